// The model: blocks that fold and open, each at every stage.

const WHOLE = 160; // statements of a block and those inside it that are shown together
const ALIKE = 6; // layers from which on most are folded into one row

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
