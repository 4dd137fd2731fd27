// Bundles the dashboard into the Python package: one script, one style sheet, one page.

import { mkdir, readFile, rename, rm, writeFile } from "node:fs/promises";
import { basename } from "node:path";
import { fileURLToPath } from "node:url";

import { build } from "esbuild";

const here = new URL(".", import.meta.url);
const target = fileURLToPath(new URL("../src/caudal/server/static/dashboard/", here));
const fresh = target.replace(/\/$/, ".new");

// The chart library's licence asks for its text in every copy.
const licence = await readFile(new URL("node_modules/uplot/LICENSE", here), "utf8");

await rm(fresh, { recursive: true, force: true });
await mkdir(fresh, { recursive: true });
const { metafile } = await build({
  entryPoints: [fileURLToPath(new URL("src/main.ts", here))],
  outdir: fresh,
  entryNames: "app-[hash]",
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  charset: "utf8",
  banner: { js: `/*! Charts by uPlot.\n${licence.trim()}\n*/` },
  legalComments: "none",
  metafile: true,
});

const files = Object.keys(metafile.outputs).map((path) => basename(path));
const named = (suffix) => {
  const found = files.find((file) => file.endsWith(suffix));
  if (!found) throw new Error(`the bundle has no ${suffix} file`);
  return found;
};
const page = await readFile(new URL("src/index.html", here), "utf8");
const filled = page.replace("{{script}}", named(".js")).replace("{{style}}", named(".css"));
await writeFile(`${fresh}/index.html`, filled);

// Swapped as a whole: a server that runs meanwhile never sees half a bundle.
await rm(target, { recursive: true, force: true });
await rename(fresh, target);
