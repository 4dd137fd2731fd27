// The dashboard: asks the server again and again and shows what it says.

import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import "./style.css";

import { ApiError, getJson } from "./api";
import { Chart } from "./charts";
import { CHARTS } from "./chart_list";
import { byId, h, setText } from "./dom";
import { Findings } from "./findings";
import { formatDuration } from "./format";
import { KeyDialog } from "./key";
import { targetOf } from "./live";
import { Machine } from "./machine";
import { Playground } from "./playground";
import { RequestTable } from "./requests";
import { startTheme } from "./theme";
import { Tiles } from "./tiles";
import { Recorder, fromHistory } from "./timeline";
import type { History, Live } from "./live";
import type { Timeline } from "./timeline";

const LIVE_MS = 1000;
const HISTORY_MS = 20_000;
// A diagnosis simulates loads, so it is not asked for more often than somebody would read it.
const DIAGNOSIS_MS = 300_000;

const WINDOWS = [
  { name: "live", label: "Live", seconds: 600 },
  { name: "1h", label: "Hour", seconds: 3600 },
  { name: "24h", label: "Day", seconds: 86_400 },
  { name: "7d", label: "Week", seconds: 604_800 },
  { name: "30d", label: "Month", seconds: 2_592_000 },
] as const;
type Window = (typeof WINDOWS)[number];

const BEGIN_WITH_HOUR_S = 600;
const UNKEPT = "Kept in memory only: the data directory cannot be used.";
const STORED_WINDOW = "caudal.window";
const VIEWS = ["overview", "playground"];

class Dashboard {
  private readonly sync = uPlot.sync("caudal");
  private readonly charts = CHARTS.map((spec) => ({ spec, chart: new Chart(spec, this.sync) }));
  private readonly recorder = new Recorder();
  private readonly tiles = new Tiles();
  private readonly requests = new RequestTable();
  private readonly machine = new Machine();
  private readonly findings = new Findings();
  private readonly keyDialog = new KeyDialog(() => {
    this.nextDiagnosis = 0;
    this.restart();
  });
  private readonly banner = byId("banner");
  private window: Window;
  private isChosen: boolean;
  private live: Live | null = null;
  private timeline: Timeline | null = null;
  private numFailed = 0;
  private timer = 0;
  private nextHistory = 0;
  private nextDiagnosis = 0;

  constructor() {
    const stored = localStorage.getItem(STORED_WINDOW);
    this.isChosen = WINDOWS.some((window) => window.name === stored);
    this.window = WINDOWS.find((window) => window.name === stored) ?? WINDOWS[0];
    byId("charts").append(...this.charts.map(({ chart }) => chart.element));
    this.makeWindowButtons();
    startTheme(() => this.charts.forEach(({ chart }) => chart.redraw()));
    document.addEventListener("visibilitychange", () => this.restart());
    new Playground();
    addEventListener("hashchange", showView);
    showView();
    void this.poll();
  }

  /** Poll at once, and history and diagnosis with it. */
  private restart(): void {
    clearTimeout(this.timer);
    if (document.hidden) return;
    this.nextHistory = 0;
    void this.poll();
  }

  private async poll(): Promise<void> {
    clearTimeout(this.timer);
    try {
      const live = await getJson<Live>("caudal/live");
      this.suit(live);
      this.show(live);
      this.keyDialog.accepted();
      this.numFailed = 0;
      this.banner.hidden = true;
      await this.refreshSlow();
    } catch (error) {
      this.fail(error);
    }
    clearTimeout(this.timer);
    const wait = LIVE_MS * Math.min(2 ** this.numFailed, 16);
    if (!document.hidden) this.timer = setTimeout(() => void this.poll(), wait);
  }

  private async refreshSlow(): Promise<void> {
    const now = performance.now();
    if (now >= this.nextHistory && this.window.name !== "live") {
      this.nextHistory = now + HISTORY_MS;
      await this.refreshHistory();
    }
    if (now >= this.nextDiagnosis) {
      this.nextDiagnosis = now + DIAGNOSIS_MS;
      void this.findings.refresh();
    }
  }

  private async refreshHistory(): Promise<void> {
    const asked = this.window;
    let history: History;
    try {
      history = await getJson<History>(`caudal/history?window=${asked.name}`);
    } catch (error) {
      if (!(error instanceof ApiError) || error.status !== 404) throw error;
      // The server was told to keep none; asking again would not help.
      this.nextHistory = Infinity;
      this.noteCharts(error.message);
      return;
    }
    if (asked !== this.window) return;
    this.timeline = fromHistory(history, asked.seconds, this.live?.time ?? Date.now() / 1000);
    this.drawCharts();
    this.noteCharts(
      !history.rows.length ? "No minute of this time has been recorded." : history.is_kept ? "" : UNKEPT,
    );
  }

  /** A server that is up for a while has a history to begin with. */
  private suit(live: Live): void {
    if (!this.isChosen && live.uptime_s > BEGIN_WITH_HOUR_S) {
      this.window = WINDOWS[1];
      byId<HTMLInputElement>("window-1h").checked = true;
    }
    this.isChosen = true;
  }

  private noteCharts(text: string): void {
    const note = byId("charts-note");
    note.hidden = !text;
    setText(note, text);
  }

  private show(live: Live): void {
    this.live = live;
    this.recorder.add(live);
    this.tiles.update(live, this.recorder);
    this.requests.update(live);
    this.machine.update(live);
    setText(byId("model-name"), live.model?.name ?? "");
    byId("state").className = `state-dot ${live.status === "ready" ? "good" : "bad"}`;
    setText(byId("uptime"), `${live.status} · up ${formatDuration(live.uptime_s)}`);
    if (this.window.name === "live") {
      this.timeline = this.recorder.timeline(this.window.seconds);
      this.drawCharts();
      this.noteCharts("");
    }
  }

  private drawCharts(): void {
    const timeline = this.timeline;
    if (!timeline) return;
    for (const { spec, chart } of this.charts) {
      chart.update(timeline, spec.target ? targetOf(this.live, spec.target) : null);
    }
  }

  private fail(error: unknown): void {
    if (error instanceof ApiError && error.status === 401) {
      this.keyDialog.refused(error.message);
      this.say("This server wants an API key. The button at the top right takes one.");
      this.numFailed = 2;
      return;
    }
    this.numFailed += 1;
    const told = error instanceof ApiError ? error.message : "no answer";
    this.say(`The server does not answer (${told}). Trying again.`);
    byId("state").className = "state-dot bad";
    setText(byId("uptime"), "unreachable");
  }

  private say(text: string): void {
    this.banner.hidden = false;
    setText(this.banner, text);
  }

  private makeWindowButtons(): void {
    const buttons = WINDOWS.map((window) => {
      const input = h("input", { type: "radio", name: "window", id: `window-${window.name}` });
      input.checked = window === this.window;
      input.addEventListener("change", () => this.choose(window));
      return h("label", {}, input, h("span", {}, window.label));
    });
    byId("windows").append(...buttons);
  }

  private choose(window: Window): void {
    this.window = window;
    this.isChosen = true;
    localStorage.setItem(STORED_WINDOW, window.name);
    this.timeline = null;
    this.restart();
  }
}

/** Shows the view that the address names, the overview otherwise. */
function showView(): void {
  const asked = location.hash.slice(1);
  const shown = VIEWS.includes(asked) ? asked : "overview";
  for (const name of VIEWS) {
    byId(name).hidden = name !== shown;
    const link = byId(`to-${name}`);
    if (name === shown) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

new Dashboard();
