// What the server's diagnosis says, where it has one.

import { ApiError, getJson } from "./api";
import { byId, h, setText } from "./dom";
import { formatDuration, formatMs, formatName, formatNumber, formatShare, formatValue } from "./format";
import { Prefixes } from "./prefixes";
import type { Child } from "./dom";

const TIMEOUT_MS = 60_000;

interface Prediction {
  metric: string;
  from: number;
  to: number;
  gain_percent: number;
}

interface Remedy {
  action: string;
  flag?: string;
  cost?: string;
  predicted?: Prediction | null;
  text?: string;
}

interface Evidence {
  text: string;
}

interface Finding {
  title: string;
  severity?: string;
  evidence?: (Evidence | string)[];
  remedies?: Remedy[];
}

interface WorstHour {
  start: number;
  num_requests: number;
  num_refused: number;
  ttft_p95_ms: number | null;
  load: number | null;
}

interface Past {
  observed_s: number;
  worst_hour: WorstHour | null;
  note: string;
}

interface Diagnosis {
  findings: Finding[];
  num_requests?: number;
  window_s?: number;
  past?: Past | null;
}

/** The panel stays away until the server has a diagnosis to give. */
export class Findings {
  private readonly panel = byId("doctor");
  private readonly list = byId("findings");
  private readonly note = byId("doctor-note");
  private readonly past = byId("doctor-past");
  private readonly button = byId("doctor-again");
  private readonly window = byId<HTMLSelectElement>("doctor-window");
  private readonly prefixes = new Prefixes();
  private isLooking = false;

  constructor() {
    this.button.addEventListener("click", () => void this.refresh());
    this.window.addEventListener("change", () => void this.refresh());
  }

  /** Never rejects: what went wrong is told in the panel. */
  async refresh(): Promise<void> {
    if (this.isLooking) return;
    this.isLooking = true;
    this.button.setAttribute("aria-disabled", "true");
    const asked = this.window.value;
    try {
      const query = asked ? `?last=${asked}` : "";
      this.show(await getJson<Diagnosis>(`caudal/doctor${query}`, TIMEOUT_MS));
      await this.prefixes.refresh();
    } catch (error) {
      const isKnown = error instanceof ApiError;
      const isAway = isKnown && (error.status === 401 || (error.status === 404 && !asked));
      if (isAway) this.panel.hidden = true;
      setText(this.note, isKnown ? error.message : "no answer");
      this.past.hidden = true;
      this.list.replaceChildren();
    } finally {
      this.isLooking = false;
      this.button.removeAttribute("aria-disabled");
    }
    // Somebody chose another time meanwhile.
    if (asked !== this.window.value) await this.refresh();
  }

  private show(diagnosis: Diagnosis): void {
    const { findings, num_requests: number, past } = diagnosis;
    const seconds = past ? past.observed_s : diagnosis.window_s;
    this.panel.hidden = false;
    const seen = number === undefined ? "" : `from ${formatNumber(number)} ${number === 1 ? "request" : "requests"}`;
    setText(this.note, seconds ? `${seen} in ${formatDuration(seconds)}` : seen);
    const told = past ? [describe(past.worst_hour), past.note].filter(Boolean).join(" ") : "";
    this.past.hidden = !told;
    setText(this.past, told);
    const items = findings.map(makeFinding);
    const isUnknown = past?.worst_hour === null;
    const none = h("p", { class: "muted" }, "Nothing limits this server noticeably.");
    this.list.replaceChildren(...(items.length || isUnknown ? items : [none]));
  }
}

function describe(hour: WorstHour | null): string {
  if (!hour) return "";
  const options = { weekday: "short", day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" } as const;
  const begins = new Date(hour.start * 1000).toLocaleString(undefined, options);
  const refused = hour.num_refused ? `, ${formatNumber(hour.num_refused)} refused` : "";
  const ttft = hour.ttft_p95_ms === null ? "" : `, TTFT p95 ${formatMs(hour.ttft_p95_ms)}`;
  const load = hour.load === null ? "" : `, load ${formatShare(hour.load)}`;
  return `Worst hour: from ${begins}, ${formatNumber(hour.num_requests)} requests${refused}${ttft}${load}.`;
}

function makeFinding(finding: Finding): HTMLElement {
  const severity = finding.severity ?? "info";
  const evidence = (finding.evidence ?? []).map((item) =>
    h("li", {}, typeof item === "string" ? item : item.text),
  );
  const remedies = (finding.remedies ?? []).map(makeRemedy);
  return h(
    "article",
    { class: "finding" },
    h("h3", {}, h("span", { class: `severity ${severity}` }, severity), finding.title),
    evidence.length ? h("ul", { class: "muted" }, ...evidence) : null,
    remedies.length ? h("ol", {}, ...remedies) : null,
  );
}

function makeRemedy(remedy: Remedy): HTMLElement {
  const { predicted } = remedy;
  const cost = remedy.cost && remedy.cost !== "nothing" ? `costs ${remedy.cost}` : "";
  return h(
    "li",
    {},
    h("span", {}, remedy.text || formatName(remedy.action)),
    remedy.flag ? h("code", {}, remedy.flag) : null,
    predicted ? makePrediction(predicted) : null,
    cost ? h("small", { class: "muted" }, cost) : null,
  );
}

function makePrediction({ metric, from, to, gain_percent: gain }: Prediction): Child {
  // Relative predictions begin at 1 and say no more than the gain does.
  const change = from === 1 ? "" : `: ${formatValue(metric, from)} → ${formatValue(metric, to)}`;
  const verdict = `${gain >= 0 ? "better" : "worse"} by ${formatNumber(Math.abs(gain))} %`;
  const told = `predicted ${formatName(metric)}${change}, ${verdict}`;
  return h("strong", { class: gain >= 0 ? "gain" : "loss" }, told);
}
