// A small line without axes.

import { svg } from "./dom";
import type { Maybe } from "./format";

const WIDTH = 120;
const HEIGHT = 28;
/** Fewer values would look like specks of dust. */
const FEWEST = 5;

/** Draws `values` into `element`; missing ones leave a gap. */
export function drawSpark(element: SVGElement, values: Maybe[], length: number): void {
  if (values.length < FEWEST) return;
  const top = Math.max(1e-9, ...values.map((value) => value ?? 0));
  let path = "";
  let isDown = false;
  values.forEach((value, index) => {
    if (value === null || value === undefined) {
      isDown = false;
      return;
    }
    const x = WIDTH - ((values.length - 1 - index) * WIDTH) / (length - 1);
    const y = HEIGHT - 2 - (value / top) * (HEIGHT - 4);
    path += `${isDown ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    isDown = true;
  });
  const line = element.firstElementChild ?? element.appendChild(svg("path", { class: "spark-line" }));
  line.setAttribute("d", path);
}

/** An empty sparkline. */
export function makeSpark(): SVGElement {
  return svg("svg", {
    class: "spark",
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    preserveAspectRatio: "none",
    "aria-hidden": "true",
  });
}
