// Points for the charts: from the server's history, or collected while the page is open.

import { SERIES, momentOf, rowReader } from "./live";
import type { Maybe } from "./format";
import type { History, Live, Moment, SeriesName } from "./live";

const MAX_MOMENTS = 900;

/** Times in seconds since the epoch, ascending, and a list of equal length for each series. */
export interface Timeline {
  times: number[];
  series: Record<SeriesName, Maybe[]>;
  start: number;
  end: number;
}

/** What the page has seen itself, the latest quarter of an hour of it. */
export class Recorder {
  private readonly times: number[] = [];
  private readonly moments: Moment[] = [];

  add(live: Live): void {
    const last = this.times.at(-1);
    if (last !== undefined && live.time <= last) return;
    this.times.push(live.time);
    this.moments.push(momentOf(live));
    if (this.times.length > MAX_MOMENTS) {
      this.times.shift();
      this.moments.shift();
    }
  }

  /** The latest values of one series, for a sparkline. */
  latest(name: SeriesName, count: number): Maybe[] {
    return this.moments.slice(-count).map((moment) => moment[name]);
  }

  timeline(seconds: number): Timeline {
    const end = this.times.at(-1) ?? Date.now() / 1000;
    const from = this.times.findIndex((time) => time >= end - seconds);
    const start = Math.max(0, from);
    // The scale grows with what there is to show: ten empty minutes would say nothing.
    const shown = Math.max(60, Math.min(seconds, end - (this.times[start] ?? end)));
    return build(this.times.slice(start), this.moments.slice(start), end - shown, end);
  }
}

/** Rows of the history, with a gap wherever rows are missing, so that lines do not bridge it. */
export function fromHistory(history: History, seconds: number, now: number): Timeline {
  const place = history.columns.indexOf("t");
  const read = rowReader(history);
  const times: number[] = [];
  const moments: (Moment | null)[] = [];
  for (const row of history.rows) {
    const begin = row[place];
    if (typeof begin !== "number") continue;
    const time = begin + history.step / 2;
    const before = times.at(-1);
    if (before !== undefined && time - before > 1.5 * history.step) {
      times.push(before + history.step);
      moments.push(null);
    }
    times.push(time);
    moments.push(read(row));
  }
  return build(times, moments, now - seconds, now);
}

function build(times: number[], moments: (Moment | null)[], start: number, end: number): Timeline {
  const pairs = SERIES.map((name) => [name, moments.map((moment) => moment?.[name] ?? null)] as const);
  return { times, series: Object.fromEntries(pairs) as Timeline["series"], start, end };
}
