// Light, dark, or what the system prefers.

import { byId } from "./dom";

const CHOICES = ["auto", "light", "dark"] as const;
const STORED = "caudal.theme";

/** Wires the button; `onChange` runs whenever colours change. */
export function startTheme(onChange: () => void): void {
  const button = byId("theme");
  const root = document.documentElement;
  const apply = (choice: string): void => {
    if (choice === "auto") delete root.dataset.theme;
    else root.dataset.theme = choice;
    button.textContent = { auto: "◐", light: "☀", dark: "☾" }[choice] ?? "◐";
    button.setAttribute("aria-label", `Colours: ${choice}. Change`);
    button.title = `Colours: ${choice}`;
    onChange();
  };
  let current = localStorage.getItem(STORED) ?? "auto";
  button.addEventListener("click", () => {
    const place = CHOICES.indexOf(current as (typeof CHOICES)[number]);
    current = CHOICES[(place + 1) % CHOICES.length] ?? "auto";
    localStorage.setItem(STORED, current);
    apply(current);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", onChange);
  apply(current);
}

// Custom properties are kept as they are written; only a real property has its colour worked out.
const probe = document.createElement("i");
probe.hidden = true;
document.body.append(probe);

/** A colour of the style sheet in the present theme, `percent` of it opaque. */
export function colour(name: string, percent = 100): string {
  probe.style.color = `color-mix(in srgb, var(--${name}) ${percent}%, transparent)`;
  return getComputedStyle(probe).color;
}
