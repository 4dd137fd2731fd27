// Where memory and the milliseconds of a step go, and what model this is.

import { byId, h, setText } from "./dom";
import { formatBytes, formatMs, formatName, formatShare, formatValue } from "./format";
import type { Live } from "./live";

interface Part {
  name: string;
  value: number;
}

/** A bar of parts with a table below it that says the same. */
class Stack {
  private readonly bar = h("div", { class: "stack", "aria-hidden": "true" });
  private readonly rows = h("tbody");

  constructor(
    place: HTMLElement,
    private readonly format: (value: number) => string,
  ) {
    place.append(this.bar, h("table", { class: "parts" }, this.rows));
  }

  update(parts: Part[], total: number): void {
    const segments: HTMLElement[] = [];
    const rows: HTMLElement[] = [];
    parts.forEach((part, index) => {
      const share = total > 0 ? part.value / total : 0;
      const segment = h("span", { title: part.name, class: `part-${index % 6}` });
      segment.style.flexGrow = String(Math.max(share, 0));
      segments.push(segment);
      const swatch = h("i", { class: `swatch part-${index % 6}` });
      rows.push(
        h(
          "tr",
          {},
          h("th", { scope: "row" }, swatch, part.name),
          h("td", { class: "number" }, this.format(part.value)),
          h("td", { class: "number muted" }, formatShare(share)),
        ),
      );
    });
    const rest = 1 - parts.reduce((sum, part) => sum + (total > 0 ? part.value / total : 0), 0);
    if (rest > 0.001) {
      const segment = h("span", { class: "part-rest" });
      segment.style.flexGrow = String(rest);
      segments.push(segment);
    }
    this.bar.replaceChildren(...segments);
    this.rows.replaceChildren(...rows);
  }
}

export class Machine {
  private readonly memory = new Stack(byId("memory"), formatBytes);
  private readonly steps = new Stack(byId("steps"), (value) => formatMs(value));
  private readonly memoryNote = byId("memory-note");
  private readonly stepsNote = byId("steps-note");
  private readonly facts = byId("facts");
  private told = "";

  update(live: Live): void {
    const { available, ...purposes } = live.engine?.memory_plan ?? {};
    const parts = Object.entries(purposes)
      .filter(([, value]) => value > 0)
      .map(([name, value]) => ({ name: formatName(name), value }));
    const planned = parts.reduce((sum, part) => sum + part.value, 0);
    this.memory.update(parts, Math.max(available ?? 0, planned));
    const of = available ? ` of ${formatBytes(available)} available` : "";
    setText(this.memoryNote, parts.length ? `${formatBytes(planned)}${of}` : "No plan is known yet.");
    this.updateSteps(live);
    this.updateFacts(live);
  }

  private updateSteps(live: Live): void {
    const parts = Object.entries(live.minute.step_parts_ms).map(([name, value]) => ({ name, value }));
    const total = parts.reduce((sum, part) => sum + part.value, 0);
    this.steps.update(parts, total);
    const outside = live.minute.cpu_outside_kernels;
    const cpu = outside === null ? "" : `; ${formatShare(outside)} of processor time outside the kernels`;
    setText(this.stepsNote, total > 0 ? `${formatMs(total)} on average${cpu}` : "none in the last minute");
  }

  private updateFacts(live: Live): void {
    const { memory_plan: _plan, settings = {}, ...engine } = live.engine ?? {};
    // The settings come last, and say nothing that is known better.
    const known = { ...live.model, ...engine, version: live.version };
    const all = { ...known, ...settings, ...known };
    const facts = Object.entries(all).filter(([, value]) => value !== null && value !== "");
    const told = JSON.stringify(facts);
    if (told === this.told) return;
    this.told = told;
    this.facts.replaceChildren(
      ...facts.map(([name, value]) =>
        h("div", {}, h("dt", {}, formatName(name)), h("dd", {}, formatValue(name, value))),
      ),
    );
  }
}
