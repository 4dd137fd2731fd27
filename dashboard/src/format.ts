// Numbers as people read them.

export type Maybe = number | null | undefined;

const NONE = "–";
const SHORT = new Map(["ttft", "tpot", "itl", "kv", "isa"].map((word) => [word, word.toUpperCase()]));

function isMissing(value: Maybe): value is null | undefined {
  return value === null || value === undefined || Number.isNaN(value);
}

/** 0.42, 3.1, 27, 1,204. */
export function formatNumber(value: Maybe): string {
  if (isMissing(value)) return NONE;
  const size = Math.abs(value);
  const digits = Number.isInteger(value) || size >= 100 ? 0 : size >= 1 ? 1 : 2;
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

/** Milliseconds: 3.4 ms, 420 ms, 1.25 s, 41 s. */
export function formatMs(value: Maybe): string {
  if (isMissing(value)) return NONE;
  if (value < 1000) return `${Number(value.toFixed(value < 9.95 ? 1 : 0))} ms`;
  const seconds = value / 1000;
  return `${Number(seconds.toFixed(seconds < 10 ? 2 : 0))} s`;
}

/** A share between 0 and 1 in per cent. */
export function formatShare(value: Maybe): string {
  if (isMissing(value)) return NONE;
  const percent = value * 100;
  return `${percent > 0 && percent < 9.95 ? percent.toFixed(1) : Math.round(percent)} %`;
}

/** Bytes in binary units: 512 MiB. */
export function formatBytes(value: Maybe): string {
  if (isMissing(value)) return NONE;
  let scaled = value;
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (scaled < 1024 || unit === "TiB") return `${Number(scaled.toPrecision(3))} ${unit}`;
    scaled /= 1024;
  }
  return NONE;
}

/** Large counts: 134.5 M. */
export function formatCount(value: Maybe): string {
  if (isMissing(value)) return NONE;
  return value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 4 });
}

/** Seconds as the two largest units: 2 d 3 h, 4 min 10 s, 8.2 s. */
export function formatDuration(seconds: Maybe): string {
  if (isMissing(seconds)) return NONE;
  if (seconds < 60) return `${seconds < 9.95 ? seconds.toFixed(1) : Math.floor(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  const rest = Math.floor(seconds % 60);
  if (minutes < 60) return `${minutes} min${minutes < 10 && rest ? ` ${rest} s` : ""}`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** `kv_cache_bytes` as "kv cache": the unit comes with the value. */
export function formatName(name: string): string {
  const words = name.replace(/(?<!_per)_(bytes|ms|s)$/, "").split("_");
  return words.map((word) => SHORT.get(word) ?? word).join(" ");
}

/** A value in the unit that its name ends with. */
export function formatValue(name: string, value: string | number | boolean | null): string {
  if (value === null) return NONE;
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "string") return value;
  if (name.endsWith("_bytes")) return formatBytes(value);
  if (name.endsWith("_ms")) return formatMs(value);
  if (name.endsWith("_s") && !name.endsWith("_per_s")) return formatDuration(value);
  return value >= 1e6 ? formatCount(value) : formatNumber(value);
}
