// The table of requests that are in the engine now.

import { byId, h, setText } from "./dom";
import { formatDuration, formatMs, formatNumber } from "./format";
import type { Child } from "./dom";
import type { Live, LiveRequest } from "./live";

const SHOWN = 100;

export class RequestTable {
  private readonly body = byId("requests-body");
  private readonly note = byId("requests-note");

  update(live: Live): void {
    const shown = live.requests.slice(0, SHOWN);
    this.body.replaceChildren(...shown.map(makeRow));
    if (!shown.length) {
      const text = "Nothing runs. Send a request, or try the playground.";
      this.body.append(h("tr", {}, h("td", { colspan: 8, class: "empty" }, text)));
    }
    const hidden = live.num_requests - shown.length;
    setText(this.note, hidden > 0 ? `and ${formatNumber(hidden)} more` : "");
  }
}

function makeRow(request: LiveRequest): HTMLElement {
  const number = (text: string): Child => h("td", { class: "number" }, text);
  return h(
    "tr",
    {},
    h("td", { class: "id" }, request.id),
    h("td", {}, h("span", { class: `state ${request.state}` }, request.state), ...makeRemarks(request)),
    number(formatDuration(request.age_s)),
    h("td", {}, makePrompt(request)),
    number(formatNumber(request.cached_tokens)),
    number(`${formatNumber(request.output_tokens)} / ${formatNumber(request.max_tokens)}`),
    number(formatMs(request.ttft_ms)),
    number(formatNumber(request.tokens_per_s)),
  );
}

/** How much of the prompt is computed. */
function makePrompt(request: LiveRequest): HTMLElement {
  const total = request.prompt_tokens;
  const known = request.computed_tokens ?? (request.state === "decode" ? total : 0);
  const done = Math.min(known, total);
  const meter = h("progress", { max: Math.max(total, 1), value: done });
  meter.setAttribute("aria-label", `${done} of ${total} prompt tokens computed`);
  return h("span", { class: "prompt" }, meter, formatNumber(total));
}

function makeRemarks(request: LiveRequest): Child[] {
  const remarks: string[] = [];
  if (request.is_batch) remarks.push("batch");
  if (request.preemptions) remarks.push(`preempted ${request.preemptions}×`);
  return remarks.map((remark) => h("small", { class: "muted" }, ` ${remark}`));
}
