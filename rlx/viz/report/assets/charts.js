// The pictures: the arena, and kernels on the roofline of the machine.

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
let drawing = Promise.resolve();

/** Draw a chart, or draw it again in the colours of now; one after the other. */
function draw(id) {
  drawn.add(id);
  drawing = drawing.then(() => show(id));
}

async function show(id) {
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
