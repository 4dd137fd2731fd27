// Which charts there are, and from which columns.

import { formatMs, formatNumber, formatShare } from "./format";
import type { ChartSpec, Series } from "./charts";

function quantiles(name: "ttft" | "tpot" | "queue"): Series[] {
  return (["p50", "p95", "p99"] as const).map((quantile, index) => ({
    label: quantile,
    name: `${name}_${quantile}`,
    colour: `series-${index + 1}`,
  }));
}

export const CHARTS: ChartSpec[] = [
  {
    title: "Time to first token",
    series: quantiles("ttft"),
    format: formatMs,
    minTop: 10,
    target: "ttft_ms",
  },
  {
    title: "Time per output token",
    series: quantiles("tpot"),
    format: formatMs,
    minTop: 5,
    target: "tpot_ms",
  },
  {
    title: "Throughput (tokens per second)",
    series: [
      { label: "output", name: "output_rate", colour: "series-1", isArea: true },
      { label: "prompts", name: "prompt_rate", colour: "series-2" },
    ],
    format: formatNumber,
    minTop: 10,
  },
  {
    title: "Requests",
    series: [
      { label: "running", name: "running", colour: "series-1", isArea: true },
      { label: "waiting", name: "waiting", colour: "series-3", isArea: true },
    ],
    format: formatNumber,
    minTop: 4,
  },
  {
    title: "KV cache",
    series: [
      { label: "in use", name: "kv_used", colour: "series-1", isArea: true },
      { label: "keep prefixes", name: "kv_cached", colour: "series-2" },
    ],
    format: formatShare,
    minTop: 1,
    maxTop: 1,
  },
  {
    title: "Prompt tokens found in the cache",
    series: [{ label: "hits", name: "hit_rate", colour: "series-1", isArea: true }],
    format: formatShare,
    minTop: 1,
    maxTop: 1,
  },
  {
    title: "Time in the queue",
    series: quantiles("queue"),
    format: formatMs,
    minTop: 10,
  },
  {
    title: "Arrived (a minute)",
    series: [
      { label: "requests", name: "arrived", colour: "series-1", isArea: true },
      { label: "failed", name: "failed", colour: "series-4", isArea: true },
    ],
    format: formatNumber,
    minTop: 4,
  },
  {
    title: "Rejected and preempted (a minute)",
    series: [
      { label: "rejected", name: "rejected", colour: "series-4", isArea: true },
      { label: "preempted", name: "preempted", colour: "series-3", isArea: true },
    ],
    format: formatNumber,
    minTop: 4,
  },
];
