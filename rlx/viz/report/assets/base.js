// What all of the page is written with. Text goes in as text, never as markup.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const STAGES = ["hir", "mir", "lir"].filter((stage) => data[stage].length);

const at = (id) => document.getElementById(id);

/** An element: attributes (class, text, and handlers as functions), then children. */
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") element.textContent = value;
    else if (typeof value === "function") element.addEventListener(name, value);
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const grouped = (n) => (n < 1e4 ? `${n}` : n.toLocaleString("en-US"));
const digits = (x) => (x >= 100 ? x.toFixed(0) : x >= 10 ? x.toFixed(1) : x.toFixed(2));

function bytes(n) {
  if (n < 1024) return `${n} B`;
  for (const unit of ["KiB", "MiB"]) {
    n /= 1024;
    if (n < 1024) return `${digits(n)} ${unit}`;
  }
  return `${digits(n / 1024)} GiB`;
}

function time(seconds) {
  if (seconds <= 0) return "";
  if (seconds < 1e-3) return `${digits(seconds * 1e6)} µs`;
  return seconds < 1 ? `${digits(seconds * 1e3)} ms` : `${digits(seconds)} s`;
}

const percent = (part, whole) => `${(whole ? (100 * part) / whole : 0).toFixed(1)} %`;
const bar = (part, whole) =>
  h("span", { class: "bar", "aria-hidden": "true" },
    h("i", { style: { width: `${whole ? (100 * part) / whole : 0}%` } }));

/** Columns are [title, class, cell]; a cell is text or an element. */
function table(columns, rows) {
  const cell = (row) => ([, kind, make]) => h("td", { class: kind }, make(row));
  return h("table", {},
    h("thead", {}, h("tr", {}, ...columns.map(([title, kind]) =>
      h("th", { scope: "col", class: kind.includes("number") ? "number" : "", text: title })))),
    h("tbody", {}, ...rows.map((row) => h("tr", {}, ...columns.map(cell(row))))));
}

/** A fold whose inside is made when it is first opened. */
function fold(kind, heading, fill) {
  const inside = h("div", { class: "inside" });
  const element = h("details", { class: kind }, h("summary", {}, ...heading), inside);
  element.fill = () => { if (!inside.hasChildNodes()) inside.append(...fill()); };
  element.addEventListener("toggle", () => { if (element.open) element.fill(); });
  return element;
}
