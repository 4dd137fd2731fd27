// Every number of GET /caudal/live as a row of a table, each second.

const STORED = "caudal.key";
const form = document.getElementById("key-form");
const status = document.getElementById("status");
const numbers = document.getElementById("numbers");

form.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(STORED, document.getElementById("key").value.trim());
  refresh();
});

/** [name, value] of every value that is no list, however deep. */
function* flatten(value, path) {
  if (Array.isArray(value)) yield [path, `${value.length} entries`];
  else if (value === null || typeof value !== "object") yield [path, value];
  else for (const [name, part] of Object.entries(value)) yield* flatten(part, path ? `${path}.${name}` : name);
}

function say(value) {
  if (value === null) return "–";
  return typeof value === "number" ? value.toLocaleString("en", { maximumFractionDigits: 3 }) : String(value);
}

async function refresh() {
  const key = sessionStorage.getItem(STORED);
  try {
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const response = await fetch("caudal/live", { headers, cache: "no-store" });
    form.hidden = response.status !== 401;
    if (!response.ok) throw new Error(response.status === 401 ? "an API key is needed" : `status ${response.status}`);
    const rows = [...flatten(await response.json(), "")].map(([name, value]) => {
      const row = document.createElement("tr");
      const heading = row.appendChild(document.createElement("th"));
      heading.scope = "row";
      heading.textContent = name.replaceAll("_", " ").replaceAll(".", " · ");
      row.appendChild(document.createElement("td")).textContent = say(value);
      return row;
    });
    numbers.replaceChildren(...rows);
    status.textContent = "Live.";
  } catch (error) {
    status.textContent = `No numbers: ${error.message}.`;
  }
}

refresh();
setInterval(refresh, 1000);
