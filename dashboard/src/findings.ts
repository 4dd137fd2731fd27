// What the server's diagnosis says, where it has one.

import { ApiError, getJson } from "./api";
import { byId, h } from "./dom";
import { formatName, formatNumber } from "./format";
import type { Child } from "./dom";

interface Remedy {
  action?: unknown;
  predicted_gain?: unknown;
  [detail: string]: unknown;
}

interface Finding {
  title?: unknown;
  evidence?: unknown;
  remedies?: Remedy[];
}

interface Diagnosis {
  findings?: Finding[];
}

/** The panel stays away until the server has a diagnosis to give. */
export class Findings {
  private readonly panel = byId("doctor");
  private readonly list = byId("findings");

  async refresh(): Promise<void> {
    try {
      const answer = await getJson<Diagnosis | Finding[]>("caudal/doctor");
      this.show(Array.isArray(answer) ? answer : (answer.findings ?? []));
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.panel.hidden = true;
    }
  }

  private show(findings: Finding[]): void {
    this.panel.hidden = false;
    const items = findings.map(makeFinding);
    this.list.replaceChildren(...(items.length ? items : [h("p", { class: "muted" }, "Nothing stands out.")]));
  }
}

function makeFinding(finding: Finding): HTMLElement {
  const remedies = (finding.remedies ?? []).map((remedy) => {
    const { action, predicted_gain: gain, ...details } = remedy;
    const predicted = say(gain);
    return h(
      "li",
      {},
      h("span", {}, say(action)),
      predicted ? h("strong", { class: "gain" }, `predicted: ${predicted}`) : null,
      makeDetails(details),
    );
  });
  return h(
    "article",
    { class: "finding" },
    h("h3", {}, say(finding.title)),
    ...makeEvidence(finding.evidence),
    remedies.length ? h("ol", {}, ...remedies) : null,
  );
}

function makeEvidence(evidence: unknown): Child[] {
  if (evidence === null || evidence === undefined || evidence === "") return [];
  if (!Array.isArray(evidence)) return [h("p", {}, say(evidence))];
  return [h("ul", {}, ...evidence.map((item) => h("li", {}, say(item))))];
}

function makeDetails(details: Record<string, unknown>): Child {
  const told = Object.entries(details).filter(([, value]) => value !== null && value !== "");
  if (!told.length) return null;
  const text = told.map(([name, value]) => `${formatName(name)}: ${say(value)}`).join(" · ");
  return h("small", { class: "muted" }, text);
}

/** Any JSON value as a phrase. */
function say(value: unknown): string {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return formatNumber(value);
  if (Array.isArray(value)) return value.map(say).join(", ");
  if (typeof value !== "object") return String(value);
  return Object.entries(value)
    .map(([name, part]) => `${formatName(name)} ${say(part)}`)
    .join(", ");
}
