// What GET /caudal/live and /caudal/history answer, and how the page's series come from these.

import type { Maybe } from "./format";

type Value = string | number | boolean | null;

export interface Spread {
  count: number;
  p50: number | null;
  p95: number | null;
  p99: number | null;
}

export interface LiveRequest {
  id: string;
  state: "waiting" | "prefill" | "decode";
  prompt_tokens: number;
  computed_tokens: number | null;
  cached_tokens: number;
  output_tokens: number;
  max_tokens: number;
  age_s: number;
  ttft_ms: number | null;
  tokens_per_s: number | null;
  preemptions: number;
  is_batch: boolean;
}

export interface LiveModel {
  name: string;
  architecture: string;
  quantization: string;
  num_parameters: number;
  weights_bytes: number;
  max_model_len: number;
}

export interface LiveEngine {
  isa: string;
  num_threads: number;
  block_size: number;
  max_num_seqs: number;
  load_ms: number;
  memory_plan: Record<string, number>;
  settings: Record<string, Value>;
}

export interface Live {
  time: number;
  status: "loading" | "ready" | "draining" | "down";
  version: string;
  uptime_s: number;
  engine_restarts: number;
  model: LiveModel | null;
  engine: LiveEngine | null;
  queue: { running: number; waiting: number; preparing: number; depth: number };
  blocks: { total: number; used: number; cached: number };
  rates: { requests: number; prompt_tokens: number; output_tokens: number; batch_output_tokens: number };
  minute: {
    seconds: number;
    requests: number;
    finished: Record<string, number>;
    rejected: Record<string, number>;
    preemptions: number;
    cache_hit_rate: number | null;
    ttft_ms: Spread;
    tpot_ms: Spread;
    queue_ms: Spread;
    step_ms: number | null;
    step_parts_ms: Record<string, number>;
    cpu_outside_kernels: number | null;
  };
  requests: LiveRequest[];
  num_requests: number;
}

export interface History {
  step: number;
  is_kept: boolean;
  columns: string[];
  rows: (number | null)[][];
}

/** Values of the page's series at one moment. */
export interface Moment {
  ttft_p50: Maybe;
  ttft_p95: Maybe;
  ttft_p99: Maybe;
  tpot_p50: Maybe;
  tpot_p95: Maybe;
  tpot_p99: Maybe;
  queue_p50: Maybe;
  queue_p95: Maybe;
  queue_p99: Maybe;
  running: Maybe;
  waiting: Maybe;
  output_rate: Maybe;
  prompt_rate: Maybe;
  kv_used: Maybe;
  kv_cached: Maybe;
  hit_rate: Maybe;
  arrived: Maybe;
  failed: Maybe;
  rejected: Maybe;
  preempted: Maybe;
}

export type SeriesName = keyof Moment;

export const SERIES: SeriesName[] = [
  ...(["ttft_p50", "ttft_p95", "ttft_p99", "tpot_p50", "tpot_p95", "tpot_p99"] as const),
  ...(["queue_p50", "queue_p95", "queue_p99", "arrived", "failed"] as const),
  ...(["running", "waiting", "output_rate", "prompt_rate"] as const),
  ...(["kv_used", "kv_cached", "hit_rate", "rejected", "preempted"] as const),
];

export function momentOf(live: Live): Moment {
  const { minute, blocks, rates, queue } = live;
  const rejected = Object.values(minute.rejected).reduce((sum, count) => sum + count, 0);
  return {
    ttft_p50: minute.ttft_ms.p50,
    ttft_p95: minute.ttft_ms.p95,
    ttft_p99: minute.ttft_ms.p99,
    tpot_p50: minute.tpot_ms.p50,
    tpot_p95: minute.tpot_ms.p95,
    tpot_p99: minute.tpot_ms.p99,
    queue_p50: minute.queue_ms.p50,
    queue_p95: minute.queue_ms.p95,
    queue_p99: minute.queue_ms.p99,
    running: queue.running,
    waiting: queue.depth,
    output_rate: rates.output_tokens + rates.batch_output_tokens,
    prompt_rate: rates.prompt_tokens,
    kv_used: ratio(blocks.used, blocks.total),
    kv_cached: ratio(blocks.cached, blocks.total),
    hit_rate: minute.cache_hit_rate,
    arrived: minute.requests,
    failed: (minute.finished.error ?? 0) + (minute.finished.timeout ?? 0),
    rejected,
    preempted: minute.preemptions,
  };
}

/** Makes moments of the rows of a history with these columns. */
export function rowReader(history: History): (row: (number | null)[]) => Moment {
  const places = new Map(history.columns.map((name, place) => [name, place]));
  return (row) => {
    const cell = (name: string): Maybe => row[places.get(name) ?? -1];
    const rate = (count: Maybe): Maybe => ratio(count, cell("seconds"));
    const perMinute = (count: Maybe): Maybe => ratio(count, (cell("seconds") ?? 0) / 60);
    return {
      ttft_p50: cell("ttft_ms_p50"),
      ttft_p95: cell("ttft_ms_p95"),
      ttft_p99: cell("ttft_ms_p99"),
      tpot_p50: cell("tpot_ms_p50"),
      tpot_p95: cell("tpot_ms_p95"),
      tpot_p99: cell("tpot_ms_p99"),
    queue_p50: cell("queue_time_ms_p50"),
    queue_p95: cell("queue_time_ms_p95"),
    queue_p99: cell("queue_time_ms_p99"),
      running: cell("running_mean"),
      waiting: cell("queue_depth_max"),
      output_rate: rate((cell("output_tokens") ?? 0) + (cell("batch_output_tokens") ?? 0)),
      prompt_rate: rate((cell("prompt_tokens") ?? 0) + (cell("batch_prompt_tokens") ?? 0)),
      kv_used: cell("kv_used_mean"),
      kv_cached: cell("kv_cached_mean"),
      hit_rate: cell("hit_rate"),
      arrived: perMinute(cell("requests")),
      failed: perMinute(cell("failed")),
      rejected: perMinute(cell("rejected")),
      preempted: perMinute(cell("preemptions")),
    };
  };
}

/** A target of the server in milliseconds, if it has one. */
export function targetOf(live: Live | null, name: "ttft_ms" | "tpot_ms"): number | null {
  const value = live?.engine?.settings[name];
  return typeof value === "number" && value > 0 ? value : null;
}

function ratio(part: Maybe, whole: Maybe): Maybe {
  return part !== null && part !== undefined && whole ? part / whole : null;
}
