// Everything that is a table, and the facts at the top.

const SHOWN = 25; // rows of the table of tensors

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
    tiles.unshift(["a run, waiting included", time(data.measured.seconds)]);
    at("model-text").textContent = twoTimes(data.measured);
    if (slowest) tiles.push([`in ${slowest.kernel}`, percent(slowest.seconds, data.measured.seconds)]);
  }
  at("tiles").append(...tiles.map(([name, value]) =>
    h("li", {}, h("strong", { text: value }), h("span", { text: name }))));
}

// A run lasts from its first kernel to its last; blocks and kernels have the time inside kernels.
function twoTimes({ seconds, kernels }) {
  const inside = kernels.reduce((sum, k) => sum + k.seconds, 0);
  const waiting = seconds - inside;
  return `Times of blocks are those inside kernels, ${time(inside)} in all` +
    (waiting > 0 ? `; a run of ${time(seconds)} also has ${time(waiting)} between them, ` +
      "where workers wait for each other." : ".");
}

// -- memory ---------------------------------------------------------------------------------------

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

// -- kernels --------------------------------------------------------------------------------------

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

// -- fusion, dispatch, compile time ---------------------------------------------------------------

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
