// Draws the report out of the JSON in the page. Text goes in as text, never as markup.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const STAGES = ["hir", "mir", "lir"].filter((stage) => data[stage].length);
const WHOLE = 160; // statements of a block and those inside it that are shown together
const ALIKE = 6; // layers from which on most are folded into one row
const SHOWN = 25; // rows of the table of tensors

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

// -- how numbers are written --------------------------------------------------------------------

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

// -- header -------------------------------------------------------------------------------------

function header() {
  at("facts").append(...data.facts.map(([name, value]) =>
    h("div", {}, h("dt", { text: name }), h("dd", { text: value }))));
  const compiling = data.spent.reduce((sum, row) => sum + row.seconds, 0);
  const tiles = [
    ["arena", bytes(data.arena.size)],
    [`statements (${STAGES.join(" → ")})`, STAGES.map((s) => grouped(data[s].length)).join("\u2009→\u2009")],
    ["to compile, nothing cached", time(compiling)],
  ];
  if (data.measured) {
    const slowest = data.measured.kernels[0];
    tiles.unshift(["a run", time(data.measured.seconds)]);
    if (slowest) tiles.push([`in ${slowest.kernel}`, percent(slowest.seconds, data.measured.seconds)]);
  }
  at("tiles").append(...tiles.map(([name, value]) =>
    h("li", {}, h("strong", { text: value }), h("span", { text: name }))));
}

// -- the tree of blocks -------------------------------------------------------------------------

const children = data.blocks.map(() => []);
data.blocks.forEach((block, i) => { if (block.parent >= 0) children[block.parent].push(i); });
const within = data.blocks.map((block) => ({
  hir: [...block.hir], mir: [...block.mir], lir: [...block.lir], seconds: 0,
}));
for (let i = data.blocks.length - 1; i >= 0; i--) { // children come after their parents
  const mine = within[i];
  mine.seconds += data.blocks[i].lir.reduce((sum, id) => sum + data.lir[id].seconds, 0);
  const parent = within[data.blocks[i].parent];
  if (!parent) continue;
  for (const stage of STAGES) parent[stage].push(...mine[stage]);
  parent.seconds += mine.seconds;
}
const opened = new Map(); // block → its element, once it is in the page

/** A fold whose inside is made when it is first opened. */
function fold(kind, heading, fill) {
  const inside = h("div", { class: "inside" });
  const element = h("details", { class: kind }, h("summary", {}, ...heading), inside);
  element.fill = () => { if (!inside.hasChildNodes()) inside.append(...fill()); };
  element.addEventListener("toggle", () => { if (element.open) element.fill(); });
  return element;
}

function block(i) {
  const { name, path } = data.blocks[i], mine = within[i], whole = within[0].seconds;
  const counts = STAGES.map((s) => `${mine[s].length} ${s}`).join(" · ");
  const heading = [
    h("span", { class: "name", text: name }),
    h("span", { class: "counts", text: counts }),
    ...(whole ? [bar(mine.seconds, whole), h("span", { class: "took", text: time(mine.seconds) })] : []),
  ];
  const large = STAGES.some((s) => mine[s].length > WHOLE);
  const element = fold("block", heading, () => (large
    ? [...rows(children[i]), stages(data.blocks[i])] : [stages(mine), ...rows(children[i])]));
  element.dataset.block = path;
  opened.set(i, element);
  return element;
}

/** Blocks below one another; of many that differ in their number only, most are folded away. */
function rows(list) {
  const pattern = (i) => data.blocks[i].name.replace(/\d+$/, "*");
  const made = [];
  for (let from = 0; from < list.length;) {
    let to = from + 1;
    while (to < list.length && pattern(list[to]) === pattern(list[from])) to++;
    const shown = to - from > ALIKE ? 3 : to - from;
    made.push(...list.slice(from, from + shown).map(block));
    const rest = list.slice(from + shown, to);
    if (rest.length) made.push(more(rest));
    from = to;
  }
  return made;
}

function more(list) {
  const name = (i) => data.blocks[i].name;
  const took = list.reduce((sum, i) => sum + within[i].seconds, 0), whole = within[0].seconds;
  const element = fold("more", [
    h("span", { class: "name", text: `${name(list[0])} … ${name(list.at(-1))}` }),
    h("span", { class: "counts", text: `${list.length} more` }),
    ...(whole ? [bar(took, whole), h("span", { class: "took", text: time(took) })] : []),
  ], () => list.map(block));
  for (const i of list) opened.set(i, element);
  return element;
}

/** The same statements at every stage, side by side. */
function stages(ids) {
  const columns = STAGES.map((s) => {
    const sorted = [...ids[s]].sort((a, b) => a - b);
    return h("div", { class: `stage ${s}` },
      h("h3", {}, s.toUpperCase(), h("span", { text: `${sorted.length} statements` })),
      h("ol", {}, ...sorted.map((id) => statement(s, data[s][id]))));
  });
  return h("div", { class: "stages", tabindex: "0", role: "group", "aria-label": "Stages" }, ...columns);
}

function statement(stage, node) {
  const own = node.name ? h("span", { text: `"${node.name}"` }) : null;
  const chips = node.results.flatMap((result) => {
    const found = [h("span", { class: "chip", text: `${result.shape} ${result.dtype}` })];
    const place = result.place && where(result.place);
    if (place) found.push(h("span", { class: "chip place", text: place }));
    return found;
  });
  if (node.phase && !node.source) {
    chips.push(h("span", { class: "chip phase", text: node.phase.replace("_", " ") }));
  }
  const origin = [node.at, node.via.length ? `via ${node.via.join(" › ")}` : ""].filter(Boolean);
  if (origin.length) chips.push(h("span", { class: "chip via", text: origin.join(", ") }));
  return h("li", { class: node.source ? "source" : "", "data-node": `${stage}-${node.id}` },
    h("div", { class: "line" },
      h("span", { class: "id", text: `%${node.id}` }), h("b", { text: node.op }), own,
      node.seconds ? h("span", { class: "took", text: time(node.seconds) }) : null),
    node.source || !node.call ? null : h("div", { class: "call", text: node.call }),
    h("div", { class: "chips" }, ...chips));
}

function where(place) {
  if (place.kind === "alias") return `view of ${place.of}`;
  if (place.offset === null) return `${place.kind}, ${bytes(place.size)}`;
  const kind = place.kind === "arena" ? "" : `${place.kind}, `;
  return `${kind}offset ${grouped(place.offset)}, ${bytes(place.size)}, lives ${place.first}–${place.last}`;
}

/** Open all folds down to a statement of the plan, and show it. */
function reveal(id) {
  const home = data.blocks.findIndex((block) => block.lir.includes(id));
  const path = [];
  for (let i = home; i >= 0; i = data.blocks[i].parent) path.unshift(i);
  for (const i of path) {
    let element;
    do { // a row of many first, which then has the block itself
      element = opened.get(i);
      element.fill();
      element.open = true;
    } while (opened.get(i) !== element);
  }
  const lines = document.querySelectorAll(`[data-node="lir-${id}"]`);
  const line = lines[lines.length - 1];
  document.querySelectorAll(".found").forEach((old) => old.classList.remove("found"));
  line.classList.add("found");
  line.scrollIntoView({ block: "center" });
}

// -- memory -------------------------------------------------------------------------------------

const KINDS = {
  arena: ["values", "--accent"],
  input: ["inputs", "--good"],
  output: ["outputs", "--lir"],
  scratch: ["working memory of kernels", "--grey"],
};

function tensorList() {
  const blockOf = new Map();
  for (const b of data.blocks) for (const id of b.lir) blockOf.set(id, b.path);
  return data.lir.flatMap((node) => node.results.map((result, k) => ({
    id: node.id,
    label: node.name || `%${node.id}${node.results.length > 1 ? `.${k}` : ""}`,
    op: node.op, block: blockOf.get(node.id), ...result,
  })));
}

function memory() {
  const { size, values } = data.arena;
  const total = values.reduce((sum, v) => sum + v.size, 0);
  at("memory-text").textContent =
    `${grouped(values.length)} values of ${bytes(total)} in all share an arena of ${bytes(size)}: ` +
    `each has its bytes from the statement that writes it to the last that reads it.`;
  at("arena-legend").append(...Object.values(KINDS).map(([title, color]) =>
    h("li", {}, h("i", { style: { background: `var(${color})` } }), title)));
  at("arena-views").hidden = LAYER < 0;
  at("one-layer").textContent = `Only ${data.blocks[Math.max(LAYER, 0)].path}`;
  at("whole-run").addEventListener("click", () => look(false));
  at("one-layer").addEventListener("click", () => look(true));
  const tensors = tensorList();
  const columns = [
    ["tensor", "code", (t) => h("a", {
      href: "#model", text: t.label,
      click: (event) => { event.preventDefault(); reveal(t.id); },
    })],
    ["op", "code", (t) => t.op],
    ["shape", "code", (t) => `${t.shape} ${t.dtype}`],
    ["place", "", (t) => (t.place.kind === "alias" ? `view of ${t.place.of}` : t.place.kind)],
    ["offset", "number offset", (t) => (t.place.offset === null ? "" : grouped(t.place.offset))],
    ["bytes", "number", (t) => grouped(t.place.size)],
    ["lives", "number", (t) => `${t.place.first}–${t.place.last}`],
    ["block", "text code", (t) => t.block],
  ];
  const show = () => {
    const wanted = at("find").value.trim().toLowerCase();
    const found = wanted
      ? tensors.filter((t) => `${t.label} %${t.id} ${t.op} ${t.block}`.toLowerCase().includes(wanted))
      : tensors.filter((t) => t.place.offset !== null).sort((a, b) => b.place.size - a.place.size);
    const rest = found.length - SHOWN;
    at("tensors").replaceChildren(
      table(columns, found.slice(0, SHOWN)),
      ...(rest > 0 ? [h("p", { text: `and ${grouped(rest)} more` })] : []));
  };
  at("find").addEventListener("input", show);
  show();
}

// -- kernels ------------------------------------------------------------------------------------

const rate = (amount, use) => (use.seconds ? amount / use.seconds / 1e9 : 0);
const roof = (name) => data.measured.roofs.find((r) => r.name === name);

/** The share of what this machine could give a kernel of this intensity, from memory. */
function attained(use) {
  const memory = roof("memory"), peak = (use.integer && roof("int8")) || roof("f32");
  if (!memory || !use.seconds) return 0;
  return Math.max(rate(use.bytes, use) / memory.gb, rate(use.flops, use) / peak.gflops);
}

function kernels() {
  const m = data.measured;
  if (!m) {
    at("kernels-text").textContent = "Not measured: the code is for another machine.";
    at("roofline-chart").remove();
    return;
  }
  const limits = m.roofs.map((r) => (r.gb
    ? `${digits(r.gb)} GB/s from ${r.name}` : `${digits(r.gflops)} G${r.name === "int8" ? "OP" : "FLOP"}/s in ${r.name}`));
  at("kernels-text").textContent =
    `The median of several runs${m.sizes ? ` with ${m.sizes}` : ""}; weights: ${m.weights}. ` +
    (limits.length ? `This machine gives ${limits.join(", ")}, measured with the report.` : "");
  if (!m.roofs.length) at("roofline-chart").remove();
  const whole = m.seconds;
  at("kernel-table").append(table([
    ["kernel", "text", (k) => k.kernel],
    ["computes", "text code", (k) => `${k.op} ${k.shape}`],
    ["calls", "number", (k) => grouped(k.calls)],
    ["time", "number", (k) => time(k.seconds) || "0"],
    ["share", "number", (k) => h("span", {}, bar(k.seconds, whole), percent(k.seconds, whole))],
    ["GB/s", "number", (k) => digits(rate(k.bytes, k))],
    ["GFLOP/s", "number", (k) => digits(rate(k.flops, k))],
    ...(m.roofs.length ? [["of its limit", "number", (k) => `${(100 * attained(k)).toFixed(0)} %`]] : []),
    ["in", "text code", (k) => k.blocks.join(", ")],
  ], m.kernels));
}

// -- fusion, dispatch, compile time -------------------------------------------------------------

function reports() {
  const fusion = (reason) => [
    ["rule", "text", (f) => f.rule],
    ["times", "number", (f) => grouped(f.count)],
    ...(reason ? [["why not", "text", (f) => f.reason]] : []),
    ["in", "text code", (f) => f.blocks.join(", ")],
  ];
  const done = data.fused.filter((f) => !f.reason), missed = data.fused.filter((f) => f.reason);
  at("fused").append(done.length ? table(fusion(false), done) : h("p", { text: "Nothing was fused." }));
  if (missed.length) at("missed").append(table(fusion(true), missed));
  else { at("missed-title").remove(); at("missed").remove(); }
  at("dispatched").append(table([
    ["op", "code", (d) => d.op],
    ["runs", "", (d) => h("span", { class: d.outcome, text: d.outcome })],
    ["nodes", "number", (d) => grouped(d.nodes)],
    ...(data.dispatch.some((d) => d.why) ? [["why", "text", (d) => d.why]] : []),
  ], data.dispatch));
}

const PARTS = {
  passes: ["Passes", "--hir"],
  plan: ["Plan", "--mir"],
  code: ["Kernels chosen and written as LLVM IR", "--accent"],
  llvm: ["LLVM", "--lir"],
  program: ["Program", "--good"],
  weights: ["Weights packed", "--grey"],
};

function compileTime() {
  const whole = data.spent.reduce((sum, row) => sum + row.seconds, 0);
  const parts = Object.entries(PARTS)
    .map(([part, [title, color]]) => {
      const list = data.spent.filter((row) => row.part === part);
      return { title, color, list, seconds: list.reduce((sum, row) => sum + row.seconds, 0) };
    })
    .filter((part) => part.list.length);
  at("compile-text").textContent =
    `${time(whole)} with nothing cached and kernels compiled one after the other. ` +
    `A second start takes kernels and packed weights from disk.`;
  at("parts").append(
    h("div", { class: "split", "aria-hidden": "true" }, ...parts.map((part) =>
      h("i", { style: { background: `var(${part.color})`, flexGrow: part.seconds / whole } }))),
    ...parts.map((part) => fold("part", [
      h("span", { class: "swatch", style: { background: `var(${part.color})` } }),
      h("span", { class: "name", text: part.title }),
      h("span", { class: "counts", text: percent(part.seconds, whole) }),
      h("span", { class: "took", text: time(part.seconds) || "0" }),
    ], () => [h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": part.title }, table([
      ["step", "text", (row) => row.name],
      ["time", "number", (row) => time(row.seconds) || "0"],
      ["share", "number", (row) => h("span", {}, bar(row.seconds, part.seconds), percent(row.seconds, whole))],
      ["", "text", (row) => row.note],
    ], part.list))])));
}

// -- charts -------------------------------------------------------------------------------------

let library = null;

/** The charting library, unpacked when the first chart comes into view. */
function charting() {
  library ??= (async () => {
    const packed = Uint8Array.from(atob(at("charts").textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    document.head.append(h("script", { text: await new Response(stream).text() }));
    return window.Bokeh;
  })();
  return library;
}

/** A colour of the style sheet, as it is in the theme of the moment. */
function color(name) {
  const probe = h("i", { style: { color: `var(${name})` } });
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

function figure(Bokeh, options) {
  const narrow = innerWidth < 760;
  const fig = Bokeh.Plotting.figure({
    sizing_mode: "stretch_width", height: narrow ? 300 : 400, toolbar_location: "above",
    tools: "pan,wheel_zoom,box_zoom,reset", active_drag: narrow ? null : "auto",
    background_fill_color: null, border_fill_color: null, outline_line_color: color("--line"),
    ...options,
  });
  fig.toolbar.logo = null;
  for (const axis of [...fig.xaxes, ...fig.yaxes]) {
    Object.assign(axis, {
      axis_line_color: color("--line"), major_tick_line_color: color("--line"),
      minor_tick_line_color: null, major_label_text_color: color("--dim"),
      axis_label_text_color: color("--dim"), axis_label_text_font_style: "normal",
    });
  }
  for (const grid of [...fig.xgrids, ...fig.ygrids]) grid.grid_line_color = color("--line");
  return fig;
}

const [UNIT, SCALE] = data.arena.size >= 1 << 24 ? ["MiB", 1 << 20] : ["KiB", 1024];
// The first of the layers, if there are some: one tells more than all of them in a row.
const LAYER = data.blocks.findIndex((b, i) => b.parent === 0 && /\d$/.test(b.name) && within[i].lir.length);

/** The part of the arena's picture in which a block's values are. */
function extent(i) {
  const ids = within[i].lir, left = Math.min(...ids), right = Math.max(...ids) + 1;
  const tops = data.arena.values
    .filter((v) => v.kind !== "scratch" && v.first < right && v.last >= left)
    .map((v) => v.offset + v.size);
  return { left, right, top: Math.max(1024, ...tops) };
}

/** Show one layer, or the whole run. */
function look(layer) {
  const whole = { left: 0, right: data.arena.positions, top: data.arena.size };
  const { left, right, top } = layer ? extent(LAYER) : whole;
  const fig = figures["arena-chart"];
  fig?.x_range.setv({ start: left, end: right });
  fig?.y_range.setv({ start: 0, end: (1.04 * top) / SCALE });
  at("one-layer").setAttribute("aria-pressed", layer);
  at("whole-run").setAttribute("aria-pressed", !layer);
}

function arenaChart(Bokeh) {
  const values = data.arena.values, scale = SCALE;
  const fig = figure(Bokeh, {
    x_axis_label: "position in the schedule", y_axis_label: UNIT,
    x_range: [0, data.arena.positions], y_range: [0, (1.04 * data.arena.size) / scale],
  });
  for (const [kind, [, name]] of Object.entries(KINDS)) {
    const some = values.filter((v) => v.kind === kind);
    const source = new Bokeh.ColumnDataSource({ data: {
      left: some.map((v) => v.first), right: some.map((v) => v.last + 1),
      bottom: some.map((v) => v.offset / scale), top: some.map((v) => (v.offset + v.size) / scale),
      name: some.map((v) => v.name), op: some.map((v) => v.op), block: some.map((v) => v.block),
      place: some.map((v) => `${grouped(v.offset)} + ${grouped(v.size)} bytes`),
      lives: some.map((v) => `${v.first}–${v.last}`),
    } });
    const drawn = fig.quad({
      left: { field: "left" }, right: { field: "right" },
      bottom: { field: "bottom" }, top: { field: "top" }, source,
      fill_color: color(name), fill_alpha: 0.5, line_color: color(name), line_width: 0.75,
      hover_fill_color: color(name), hover_fill_alpha: 1,
    });
    fig.add_tools(new Bokeh.HoverTool({ renderers: [drawn], visible: kind === "arena", tooltips: [
      ["tensor", "@name"], ["op", "@op"], ["block", "@block"], ["offset", "@place"], ["lives", "@lives"],
    ] }));
  }
  return fig;
}

function rooflineChart(Bokeh) {
  const uses = data.measured.kernels.filter((k) => k.flops && k.bytes && k.seconds);
  const intensity = (k) => k.flops / k.bytes;
  const peaks = data.measured.roofs.filter((r) => r.gflops), slopes = data.measured.roofs.filter((r) => r.gb);
  const top = Math.max(...peaks.map((r) => r.gflops), ...uses.map((k) => rate(k.flops, k)));
  const left = Math.min(0.1, ...uses.map(intensity)) / 2;
  const right = 4 * Math.max(top / Math.min(...slopes.map((r) => r.gb)), ...uses.map(intensity));
  const low = Math.min(1, ...uses.map((k) => rate(k.flops, k))) / 2;
  const fig = figure(Bokeh, {
    x_axis_type: "log", y_axis_type: "log", x_range: [left, right], y_range: [low, 6 * top],
    x_axis_label: "FLOP per byte", y_axis_label: "GFLOP/s",
  });
  const highest = Math.max(...peaks.map((r) => r.gflops));
  const label = (x, y, text, more = {}) => fig.add_layout(new Bokeh.Label({
    x, y, text, text_color: color("--dim"), text_font_size: "12px", y_offset: 3, ...more,
  }));
  for (const r of slopes) {
    fig.line([left, highest / r.gb], [left * r.gb, highest], { line_color: color("--dim"), line_width: 2 });
    // below the line, which goes up and away from it
    label(left, left * r.gb, `${r.name}, ${digits(r.gb)} GB/s`, { x_offset: 8, y_offset: -3, text_baseline: "top" });
  }
  const steepest = Math.max(...slopes.map((r) => r.gb));
  for (const r of peaks) {
    fig.line([r.gflops / steepest, right], [r.gflops, r.gflops], { line_color: color("--lir"), line_width: 2 });
    label(right / 1.1, r.gflops, `${r.name}, ${digits(r.gflops)} G${r.name === "int8" ? "OP" : "FLOP"}/s`, { text_align: "right" });
  }
  const whole = data.measured.seconds;
  const source = new Bokeh.ColumnDataSource({ data: {
    x: uses.map(intensity), y: uses.map((k) => rate(k.flops, k)),
    size: uses.map((k) => 7 + 34 * Math.sqrt(k.seconds / whole)),
    kernel: uses.map((k) => k.kernel), computes: uses.map((k) => `${k.op} ${k.shape}`),
    took: uses.map((k) => `${time(k.seconds)}, ${percent(k.seconds, whole)}`),
    speed: uses.map((k) => `${digits(rate(k.bytes, k))} GB/s, ${digits(rate(k.flops, k))} GFLOP/s`),
    share: uses.map((k) => `${(100 * attained(k)).toFixed(0)} %`),
  } });
  const drawn = fig.scatter({
    x: { field: "x" }, y: { field: "y" }, size: { field: "size" }, source,
    fill_color: color("--accent"), fill_alpha: 0.6, line_color: color("--card"),
  });
  fig.add_tools(new Bokeh.HoverTool({ renderers: [drawn], tooltips: [
    ["kernel", "@kernel"], ["computes", "@computes"], ["time", "@took"], ["speed", "@speed"], ["of its limit", "@share"],
  ] }));
  const costliest = uses.filter((k, i) => uses.findIndex((other) => other.kernel === k.kernel) === i);
  for (const k of innerWidth < 760 ? [] : costliest.slice(0, 2)) {
    label(intensity(k), rate(k.flops, k), k.kernel, { x_offset: 14, y_offset: -14, text_color: color("--ink") });
  }
  return fig;
}

const CHARTS = { "arena-chart": arenaChart, "roofline-chart": rooflineChart };
const drawn = new Set();
const figures = {};

async function draw(id) {
  drawn.add(id);
  const Bokeh = await charting();
  at(id).replaceChildren();
  figures[id] = CHARTS[id](Bokeh);
  if (id === "arena-chart") look(LAYER >= 0);
  await Bokeh.Plotting.show(figures[id], at(id));
  at(id).dataset.drawn = "";
}

function charts() {
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting && !drawn.has(entry.target.id)) draw(entry.target.id);
    }
  }, { rootMargin: "300px" });
  for (const id of Object.keys(CHARTS)) if (at(id)) seen.observe(at(id));
}

// -- theme --------------------------------------------------------------------------------------

const THEMES = { system: "", light: "light", dark: "dark" };

function setTheme(name) {
  document.documentElement.style.colorScheme = THEMES[name];
  at("theme").lastElementChild.textContent = `Theme: ${name}`;
  at("theme").setAttribute("aria-label", `Theme: ${name}`);
  at("theme").dataset.theme = name;
  for (const id of drawn) draw(id); // charts are pictures: they take their colours when drawn
}

function theme() {
  at("theme").addEventListener("click", () => {
    const names = Object.keys(THEMES);
    setTheme(names[(names.indexOf(at("theme").dataset.theme) + 1) % names.length]);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const id of drawn) draw(id);
  });
  setTheme("system");
}

header();
const root = block(0);
at("tree").append(root);
root.open = true;
root.fill();
memory();
kernels();
reports();
compileTime();
theme();
charts();
document.documentElement.dataset.ready = performance.now().toFixed(0);
