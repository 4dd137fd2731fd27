// Where prompts stopped matching what was cached, and what would help.

import { ApiError, getJson } from "./api";
import { byId, h } from "./dom";
import { formatMs, formatNumber, formatShare } from "./format";

interface Pattern {
  token: number;
  reason: string;
  num_requests: number;
  lost_tokens: number;
  share_lost: number;
  lost_ms: number;
  changed: string;
  neighbour_changed: string;
  advice: string;
}

const SHOWN = 5;

/** A list within the diagnosis; empty where nothing was lost. */
export class Prefixes {
  private readonly list = byId("prefixes");

  async refresh(): Promise<void> {
    try {
      const report = await getJson<{ patterns: Pattern[] }>("caudal/prefixes?limit=1");
      this.list.replaceChildren(...report.patterns.slice(0, SHOWN).map(makePattern));
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.list.replaceChildren();
    }
  }
}

function makePattern(pattern: Pattern): HTMLElement {
  const prompts = pattern.num_requests === 1 ? "prompt" : "prompts";
  const place = `${formatNumber(pattern.num_requests)} ${prompts}, from token ${formatNumber(pattern.token)} on`;
  const cost = `${formatNumber(pattern.lost_tokens)} tokens (${formatShare(pattern.share_lost)}) computed again, ${formatMs(pattern.lost_ms)}`;
  return h(
    "article",
    { class: "finding" },
    h("h3", {}, h("span", { class: "severity" }, "prefix"), `${place}: ${pattern.reason.replaceAll("_", " ")}`),
    h("ul", { class: "muted" }, h("li", {}, cost)),
    pattern.neighbour_changed || pattern.changed
      ? h("p", {}, "Was ", quote(pattern.neighbour_changed), " and became ", quote(pattern.changed))
      : null,
    pattern.advice ? h("p", {}, pattern.advice) : null,
  );
}

function quote(text: string): HTMLElement {
  return h("code", {}, text || "nothing");
}
