// Time charts: uPlot with the page's colours, a legend that shows values, and target lines.

import uPlot from "uplot";

import { h, setText } from "./dom";
import { colour } from "./theme";
import type { Maybe } from "./format";
import type { SeriesName } from "./live";
import type { Timeline } from "./timeline";

export interface Series {
  label: string;
  name: SeriesName;
  /** A colour of the style sheet. */
  colour: string;
  isArea?: boolean;
}

export interface ChartSpec {
  title: string;
  series: Series[];
  format: (value: Maybe) => string;
  /** Smallest upper end of the scale, so that noise near zero is not blown up. */
  minTop: number;
  /** Of shares: the scale ends here. */
  maxTop?: number;
  /** Which target of the server this chart shows as a line. */
  target?: "ttft_ms" | "tpot_ms";
}

const HEIGHT = 168;

/** One chart with its heading; follows the width of its place. */
export class Chart {
  readonly element: HTMLElement;
  private readonly plot: uPlot;
  private readonly values: HTMLElement[] = [];
  private readonly targetValue = h("b", {}, "");
  private readonly targetItem = h(
    "span",
    { class: "chart-target", hidden: true },
    h("i", { class: "dashes" }),
    "target ",
    this.targetValue,
  );
  private readonly time = h("span", { class: "chart-time" });
  private readonly canvas: HTMLElement;
  private range: [number, number] = [0, 1];
  private target: Maybe = null;
  private index: Maybe = null;

  constructor(
    private readonly spec: ChartSpec,
    sync: uPlot.SyncPubSub,
  ) {
    const legend = spec.series.map((series) => {
      const value = h("b", {}, "–");
      this.values.push(value);
      const swatch = h("i", { class: "swatch" });
      swatch.style.background = `var(--${series.colour})`;
      return h("span", { class: "legend-item" }, swatch, `${series.label} `, value);
    });
    this.canvas = h("div", { class: "plot", tabindex: 0, role: "img" });
    this.element = h(
      "figure",
      { class: "card chart" },
      h(
        "figcaption",
        {},
        h("div", { class: "chart-head" }, h("h3", {}, spec.title), this.targetItem, this.time),
        h("div", { class: "legend" }, ...legend),
      ),
      this.canvas,
    );
    this.plot = new uPlot(this.options(sync), this.noData(), this.canvas);
    new ResizeObserver(() => this.resize()).observe(this.canvas);
    this.canvas.addEventListener("keydown", (event) => this.move(event));
    this.canvas.addEventListener("blur", () => this.point(-10, -10));
  }

  update(timeline: Timeline, target: Maybe): void {
    this.range = [timeline.start, timeline.end];
    this.target = target;
    this.targetItem.hidden = !target;
    setText(this.targetValue, this.spec.format(target));
    const values = this.spec.series.map((series) => timeline.series[series.name]);
    this.plot.setData([timeline.times, ...values] as uPlot.AlignedData);
    this.showValues();
  }

  redraw(): void {
    this.plot.redraw(false, true);
  }

  private noData(): uPlot.AlignedData {
    return [[], ...this.spec.series.map(() => [])] as uPlot.AlignedData;
  }

  private options(sync: uPlot.SyncPubSub): uPlot.Options {
    const axis: uPlot.Axis = {
      stroke: () => colour("muted"),
      grid: { stroke: () => colour("line"), width: 1 },
      ticks: { show: false },
      font: "11px system-ui, sans-serif",
    };
    return {
      width: 300,
      height: HEIGHT,
      padding: [8, 18, 0, 0],
      legend: { show: false },
      cursor: { y: false, sync: { key: sync.key }, drag: { x: false, y: false } },
      scales: {
        x: { time: true, range: () => this.range },
        y: { range: (_plot, _low, high) => [0, this.top(high)] },
      },
      axes: [
        { ...axis, size: 24, space: 64, values: (_plot, ticks) => this.nameTimes(ticks) },
        { ...axis, size: 56, space: 34, values: (_plot, ticks) => ticks.map((tick) => this.nameTick(tick)) },
      ],
      series: [{}, ...this.spec.series.map((series) => this.line(series))],
      hooks: {
        draw: [(plot) => this.drawTarget(plot)],
        setCursor: [(plot) => this.showValues(plot.cursor.idx)],
      },
    };
  }

  private line(series: Series): uPlot.Series {
    return {
      label: series.label,
      stroke: () => colour(series.colour),
      width: 1.75,
      ...(series.isArea ? { fill: () => colour(series.colour, 20) } : {}),
      points: { size: 4, filter: (plot, index, isShown) => (isShown ? null : lonely(plot.data[index])) },
    };
  }

  private nameTick(value: number): string {
    return value === 0 ? "0" : this.spec.format(value);
  }

  /** Days for long stretches, seconds for short ones. */
  private nameTimes(times: number[]): string[] {
    const step = (times[1] ?? 0) - (times[0] ?? 0);
    const options: Intl.DateTimeFormatOptions =
      step >= 43_200
        ? { day: "numeric", month: "short" }
        : { hour: "2-digit", minute: "2-digit", ...(step < 60 ? { second: "2-digit" } : {}) };
    return times.map((time) => new Date(time * 1000).toLocaleString([], { ...options, hour12: false }));
  }

  /** Upper end of the y scale: room for the data and the target. */
  private top(high: Maybe): number {
    const wanted = Math.max((high ?? 0) * 1.1, (this.target ?? 0) * 1.15, this.spec.minTop);
    return Math.min(wanted, this.spec.maxTop ?? Infinity);
  }

  private drawTarget(plot: uPlot): void {
    if (!this.target) return;
    const { ctx, bbox } = plot;
    const y = Math.round(plot.valToPos(this.target, "y", true)) + 0.5;
    const ratio = devicePixelRatio;
    ctx.save();
    ctx.strokeStyle = colour("target");
    ctx.lineWidth = Math.max(1, ratio);
    ctx.setLineDash([6 * ratio, 4 * ratio]);
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
    ctx.restore();
  }

  /** The values under the cursor, else the latest. */
  private showValues(index: Maybe = this.index): void {
    this.index = index;
    const times = this.plot.data[0];
    const place = index ?? times.length - 1;
    this.values.forEach((element, series) => {
      setText(element, this.spec.format(this.plot.data[series + 1]?.[place]));
    });
    const time = times[place];
    const told = index === null || index === undefined || time === undefined ? "" : clock(time);
    setText(this.time, told);
    this.canvas.setAttribute("aria-label", this.description(time));
  }

  private description(time: number | undefined): string {
    const values = this.spec.series.map(
      (series, place) => `${series.label} ${this.values[place]?.textContent ?? ""}`,
    );
    const target = this.target ? `; target ${this.spec.format(this.target)}` : "";
    const when = time === undefined ? "no data yet" : `${clock(time)}: ${values.join(", ")}`;
    return `${this.spec.title}. ${when}${target}. Arrow keys move along the time.`;
  }

  /** Arrow keys move the cursor, so that values can be read without a pointer. */
  private move(event: KeyboardEvent): void {
    const times = this.plot.data[0];
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined || !times.length) return;
    event.preventDefault();
    const from = this.index ?? times.length - 1;
    const place = Math.min(Math.max(from + step, 0), times.length - 1);
    this.point(this.plot.valToPos(times[place] ?? 0, "x"), 10);
  }

  /** Places the cursor here and in all other charts. */
  private point(left: number, top: number): void {
    // The third argument, to publish the move, is missing in the library's types.
    const setCursor: (at: { left: number; top: number }, fires: boolean, publishes: boolean) => void =
      this.plot.setCursor;
    setCursor({ left, top }, true, true);
  }

  private resize(): void {
    const width = Math.floor(this.canvas.clientWidth);
    if (width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
  }
}

/** Places of values without neighbours: no line leads to these. */
function lonely(values: uPlot.AlignedData[number] | undefined): number[] | null {
  const found: number[] = [];
  values?.forEach((value, place) => {
    const isAlone = (values[place - 1] ?? null) === null && (values[place + 1] ?? null) === null;
    if (value !== null && value !== undefined && isAlone) found.push(place);
  });
  return found.length ? found : null;
}

function clock(time: number): string {
  const date = new Date(time * 1000);
  const isToday = date.toDateString() === new Date().toDateString();
  const day = isToday ? {} : ({ weekday: "short" } as const);
  return date.toLocaleString([], { ...day, hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
}
