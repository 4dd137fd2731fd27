// The numbers at the top: value, what it is, how it moved, and whether it meets its target.

import { byId, h, setText } from "./dom";
import { drawSpark, makeSpark } from "./spark";
import { formatMs, formatNumber, formatShare } from "./format";
import { momentOf, targetOf } from "./live";
import type { Maybe } from "./format";
import type { Live, Moment, SeriesName } from "./live";
import type { Recorder } from "./timeline";

const SPARK_LENGTH = 120;

interface TileSpec {
  title: string;
  series: SeriesName;
  format: (value: Maybe) => string;
  note?: (values: Moment) => string;
  /** Which target the value should not exceed. */
  target?: "ttft_ms" | "tpot_ms";
}

const TILES: TileSpec[] = [
  {
    title: "Running",
    series: "running",
    format: formatNumber,
    note: (values) => `${formatNumber(values.waiting)} waiting`,
  },
  {
    title: "Output",
    series: "output_rate",
    format: (value) => `${formatNumber(value)} tok/s`,
    note: (values) => `${formatNumber(values.prompt_rate)} tok/s of prompts`,
  },
  {
    title: "First token (p95)",
    series: "ttft_p95",
    format: formatMs,
    target: "ttft_ms",
  },
  {
    title: "Per token (p95)",
    series: "tpot_p95",
    format: formatMs,
    target: "tpot_ms",
  },
  {
    title: "KV cache",
    series: "kv_used",
    format: formatShare,
    note: (values) => `${formatShare(values.kv_cached)} more keep prefixes`,
  },
  {
    title: "Prefix hits",
    series: "hit_rate",
    format: formatShare,
    note: () => "of prompt tokens",
  },
];

export class Tiles {
  private readonly tiles = TILES.map((spec) => {
    const value = h("div", { class: "value" }, "–");
    const note = h("span", {}, "");
    const badge = h("span", { class: "badge", hidden: true });
    const spark = makeSpark();
    const element = h(
      "div",
      { class: "card tile" },
      h("h2", {}, spec.title),
      value,
      h("div", { class: "tile-note" }, note, badge),
      spark,
    );
    return { spec, value, note, badge, spark, element };
  });

  constructor() {
    byId("tiles").append(...this.tiles.map((tile) => tile.element));
  }

  update(live: Live, recorder: Recorder): void {
    const values = momentOf(live);
    for (const { spec, value, note, badge, spark } of this.tiles) {
      const target = spec.target ? targetOf(live, spec.target) : null;
      setText(value, spec.format(values[spec.series]));
      setText(note, spec.note?.(values) ?? (target ? `target ${formatMs(target)}` : "last minute"));
      drawSpark(spark, recorder.latest(spec.series, SPARK_LENGTH), SPARK_LENGTH);
      judge(badge, values[spec.series], target);
    }
  }
}

function judge(badge: HTMLElement, value: Maybe, target: Maybe): void {
  badge.hidden = !target || value === null || value === undefined;
  if (badge.hidden) return;
  const isMet = (value ?? 0) <= (target ?? 0);
  badge.className = `badge ${isMet ? "good" : "bad"}`;
  setText(badge, isMet ? "✓ met" : "▲ missed");
}
