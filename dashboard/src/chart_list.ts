// Which charts there are, and from which columns.

import { formatMs, formatNumber, formatShare } from "./format";
import type { ChartSpec, Series } from "./charts";

type Line = [label: string, name: Series["name"], colour: 1 | 2 | 3 | 4, isArea?: boolean];

function series([label, name, colour, isArea = true]: Line): Series {
  return { label, name, colour: `series-${colour}`, isArea };
}

/** Median and tail of a time. */
function times(
  title: string,
  name: "ttft" | "tpot" | "queue",
  minTop: number,
  target?: ChartSpec["target"],
): ChartSpec {
  const lines = (["p50", "p95", "p99"] as const).map((quantile, index) =>
    series([quantile, `${name}_${quantile}`, (index + 1) as 1 | 2 | 3, false]),
  );
  return { title, series: lines, format: formatMs, minTop, ...(target ? { target } : {}) };
}

function counts(title: string, minTop: number, ...lines: Line[]): ChartSpec {
  return { title, series: lines.map(series), format: formatNumber, minTop };
}

function shares(title: string, ...lines: Line[]): ChartSpec {
  return { title, series: lines.map(series), format: formatShare, minTop: 1, maxTop: 1 };
}

export const CHARTS: ChartSpec[] = [
  times("Time to first token", "ttft", 10, "ttft_ms"),
  times("Time per output token", "tpot", 5, "tpot_ms"),
  counts(
    "Throughput (tokens per second)",
    10,
    ["output", "output_rate", 1],
    ["prompts", "prompt_rate", 2, false],
  ),
  counts("Requests", 4, ["running", "running", 1], ["waiting", "waiting", 3]),
  shares("KV cache", ["in use", "kv_used", 1], ["keep prefixes", "kv_cached", 2, false]),
  shares("Prompt tokens found in the cache", ["hits", "hit_rate", 1]),
  times("Time in the queue", "queue", 10),
  counts("Arrived (a minute)", 4, ["requests", "arrived", 1], ["failed", "failed", 4]),
  counts(
    "Rejected and preempted (a minute)",
    4,
    ["rejected", "rejected", 4],
    ["preempted", "preempted", 3],
  ),
];
