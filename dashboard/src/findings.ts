// What the server's diagnosis says, where it has one.

import { ApiError, getJson } from "./api";
import { byId, h, setText } from "./dom";
import { formatDuration, formatName, formatNumber, formatValue } from "./format";
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

interface Diagnosis {
  findings: Finding[];
  num_requests?: number;
  window_s?: number;
}

/** The panel stays away until the server has a diagnosis to give. */
export class Findings {
  private readonly panel = byId("doctor");
  private readonly list = byId("findings");
  private readonly note = byId("doctor-note");
  private readonly button = byId("doctor-again");
  private readonly prefixes = new Prefixes();
  private isLooking = false;

  constructor() {
    this.button.addEventListener("click", () => void this.refresh());
  }

  /** Never rejects: what went wrong is told in the panel. */
  async refresh(): Promise<void> {
    if (this.isLooking) return;
    this.isLooking = true;
    this.button.setAttribute("aria-disabled", "true");
    try {
      this.show(await getJson<Diagnosis>("caudal/doctor", TIMEOUT_MS));
      await this.prefixes.refresh();
    } catch (error) {
      const isKnown = error instanceof ApiError;
      if (isKnown && (error.status === 404 || error.status === 401)) this.panel.hidden = true;
      setText(this.note, isKnown ? error.message : "no answer");
    } finally {
      this.isLooking = false;
      this.button.removeAttribute("aria-disabled");
    }
  }

  private show(diagnosis: Diagnosis): void {
    const { findings, num_requests: number, window_s: seconds } = diagnosis;
    this.panel.hidden = false;
    const seen = number === undefined ? "" : `from ${formatNumber(number)} ${number === 1 ? "request" : "requests"}`;
    setText(this.note, seconds ? `${seen} in ${formatDuration(seconds)}` : seen);
    const items = findings.map(makeFinding);
    const none = h("p", { class: "muted" }, "Nothing limits this server noticeably.");
    this.list.replaceChildren(...(items.length ? items : [none]));
  }
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
