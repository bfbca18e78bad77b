"use strict";
// What a model writes is shown by text nodes alone: no HTML of it is ever parsed.

const $ = (id) => document.getElementById(id);
const CONVERSATION = "rlx.conversation", SETTINGS = "rlx.settings", KEY = "rlx.key";
const KEPT = ["system", "temperature", "tokens", "tools"];
let talk = [];      // {role, content, reasoning, calls, call, stats}
let chosen = "";    // the model, which may not be in the list yet
let listing = null; // the models, while they are asked for
let running = null; // the AbortController of the answer that is being written

// --- elements

function make(tag, kind, ...inside) {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  made.append(...inside);
  return made;
}

// --- text of a model: paragraphs, headings, lists, fenced code; bold, italic and code in lines

function inline(text) {
  const made = document.createDocumentFragment();
  const marks = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*/g;
  let at = 0;
  for (const found of text.matchAll(marks)) {
    const [whole, code, bold, slanted] = found;
    made.append(text.slice(at, found.index));
    made.append(code ? make("code", "", code) : bold ? make("strong", "", bold) : make("em", "", slanted));
    at = found.index + whole.length;
  }
  made.append(text.slice(at));
  return made;
}

function blocks(text) {
  const found = [];
  let open = null; // the block that the next line may continue
  const begin = (kind, more) => found.push(open = { kind, lines: [], ...more });
  for (const line of text.split("\n")) {
    const fence = /^ {0,3}(`{3,}|~{3,})([^`]*)$/.exec(line);
    if (open?.kind === "code") {
      if (fence && fence[1].startsWith(open.fence) && !fence[2].trim()) open = null;
      else open.lines.push(line);
      continue;
    }
    const heading = /^#{1,6}\s+(.*)$/.exec(line), item = /^\s*([-*+]|\d{1,9}[.)])\s+(.*)$/.exec(line);
    if (fence) begin("code", { fence: fence[1], language: fence[2].trim().slice(0, 40) });
    else if (heading) { begin("heading"); open.lines.push(heading[1]); open = null; }
    else if (item) {
      const kind = item[1].length > 1 ? "ol" : "ul";
      if (open?.kind !== kind) begin(kind, { first: parseInt(item[1], 10) });
      open.lines.push(item[2]);
    } else if (!line.trim()) open = null;
    else {
      if (open?.kind !== "p") begin("p");
      open.lines.push(line);
    }
  }
  return found;
}

function drawn(block) {
  const text = block.lines.join("\n");
  if (block.kind === "code") return codeBlock(block.language, text);
  if (block.kind === "heading") return make("h3", "", inline(text));
  if (block.kind === "p") return make("p", "", inline(text));
  const list = make(block.kind, "", ...block.lines.map((line) => make("li", "", inline(line))));
  if (block.kind === "ol") list.start = block.first;
  return list;
}

function codeBlock(language, text) {
  const head = make("figcaption", "", make("span", "", language || "code"));
  if (navigator.clipboard) {
    const copy = make("button", "", "Copy");
    copy.type = "button";
    copy.addEventListener("click", () => navigator.clipboard.writeText(text).then(
      () => { copy.textContent = "Copied"; }, () => { copy.textContent = "Not allowed"; }));
    head.append(copy);
  }
  return make("figure", "", head, make("pre", "", make("code", "", text)));
}

// only blocks that changed are drawn again: a long answer stays cheap
function drawText(place, text) {
  const wanted = blocks(text);
  wanted.forEach((block, i) => {
    const source = JSON.stringify(block), old = place.children[i];
    if (old?.source === source) return;
    const made = drawn(block);
    made.source = source;
    if (old) old.replaceWith(made); else place.append(made);
  });
  while (place.children.length > wanted.length) place.lastChild.remove();
}

// --- the conversation

const NAMES = { user: "You", assistant: "Model", tool: "Result" };

function draw(turn) {
  const part = turn.part ??= make("article", turn.role);
  if (!part.isConnected) $("talk").append(part);
  if (turn.role !== "assistant") {
    const name = turn.role === "tool" ? `Result of ${turn.name}` : NAMES[turn.role];
    part.replaceChildren(make("h2", "", name), make("div", "body", turn.content));
    return;
  }
  if (!turn.body) {
    turn.body = make("div", "body");
    turn.said = make("div", "said");
    turn.line = make("p", "stats");
    turn.body.append(turn.said);
    part.append(make("h2", "", turn.model || NAMES.assistant), turn.body, turn.line);
  }
  if (turn.reasoning) {
    if (!turn.thought) {
      turn.thought = make("details", "thought", make("summary", ""), make("p", ""));
      turn.body.prepend(turn.thought);
    }
    turn.thought.firstChild.textContent = turn.content || turn.calls?.length || turn.done ? "Reasoning" : "Reasoning …";
    turn.thought.lastChild.textContent = turn.reasoning;
  }
  drawText(turn.said, turn.content);
  for (const [i, call] of (turn.calls ?? []).entries()) {
    call.part ??= codeBlock(`calls ${call.name}`, "");
    if (!call.part.isConnected) turn.body.append(call.part);
    call.part.classList.add("call");
    call.part.querySelector("code").textContent = call.arguments;
    call.part.dataset.index = i;
  }
  part.classList.toggle("busy", !turn.done);
  part.setAttribute("aria-busy", String(!turn.done));
  turn.line.textContent = turn.stats ?? "";
}

function follow(change) {
  const box = $("talk"), atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
  change();
  $("empty").hidden = talk.length > 0;
  if (atEnd) box.scrollTop = box.scrollHeight;
}

const waiting = () => { // calls of the last answer that have no result yet
  const last = talk.findLast((turn) => turn.role === "assistant");
  const given = new Set(talk.filter((turn) => turn.role === "tool").map((turn) => turn.call));
  return (last?.calls ?? []).filter((call) => !given.has(call.id));
};

function nameInput() {
  const call = waiting()[0], name = call ? `Result of ${call.name}` : "Message";
  $("text-label").textContent = $("text").placeholder = name;
}

function save() {
  const plain = talk.filter((turn) => turn.role !== "assistant" || turn.done).map((turn) => ({
    role: turn.role, content: turn.content, reasoning: turn.reasoning, call: turn.call, name: turn.name,
    model: turn.model, stats: turn.stats,
    calls: turn.calls?.map(({ id, name, arguments: given }) => ({ id, name, arguments: given })),
  }));
  keep(localStorage, CONVERSATION, JSON.stringify(plain));
}

function keep(store, name, text) {
  try { store.setItem(name, text); } catch { /* full or switched off: this page works without */ }
}

function kept(store, name) {
  try { return JSON.parse(store.getItem(name)); } catch { return null; }
}

function restore() {
  const told = kept(localStorage, SETTINGS) ?? {};
  $("tokens").value = "512";
  for (const name of KEPT) if (typeof told[name] === "string") $(name).value = told[name];
  chosen = typeof told.model === "string" ? told.model : "";
  $("key").value = kept(sessionStorage, KEY) ?? "";
  const turns = kept(localStorage, CONVERSATION);
  const known = (turn) => turn && turn.role in NAMES && typeof turn.content === "string";
  talk = Array.isArray(turns) ? turns.filter(known).map((turn) => ({ ...turn, done: true })) : [];
  follow(() => talk.forEach(draw));
  $("talk").scrollTop = $("talk").scrollHeight;
  nameInput();
}

function remember() {
  const told = Object.fromEntries(KEPT.map((name) => [name, $(name).value]));
  keep(localStorage, SETTINGS, JSON.stringify({ ...told, model: chosen }));
  keep(sessionStorage, KEY, JSON.stringify($("key").value));
}

// --- the server

class Refusal extends Error {}

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function refusal(response) {
  const text = await response.text();
  let said = text.slice(0, 2000);
  try { said = JSON.parse(text).error.message; } catch { /* not ours: as it is */ }
  return new Refusal(`${response.status}: ${said}`);
}

async function call(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("The server does not answer. Is it running?");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.startsWith("data: ") ? part.slice(6) : "";
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

async function listModels() {
  try {
    const { data } = await (await call("/v1/models", { headers: headers() })).json();
    $("model").replaceChildren(...data.map(({ id }) => new Option(id, id)));
    if (data.some(({ id }) => id === chosen)) $("model").value = chosen;
    chosen = $("model").value;
    complain("");
  } catch (error) {
    $("model").replaceChildren();
    complain(error.message);
    if (error.message.startsWith("401")) { showSettings(true); $("key").focus(); }
  }
}

function request() {
  const body = { model: chosen, messages: [], stream: true, stream_options: { include_usage: true } };
  if ($("temperature").value) body.temperature = Number($("temperature").value);
  if ($("tokens").value) body.max_tokens = Number($("tokens").value);
  if ($("system").value.trim()) body.messages.push({ role: "system", content: $("system").value });
  for (const turn of talk) {
    if (turn.role === "tool") body.messages.push({ role: "tool", tool_call_id: turn.call, content: turn.content });
    else if (turn.calls?.length) {
      const calls = turn.calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
      body.messages.push({ role: turn.role, content: turn.content || null, tool_calls: calls });
    } else body.messages.push({ role: turn.role, content: turn.content });
  }
  if ($("tools").value.trim()) {
    try { body.tools = JSON.parse($("tools").value); } catch (error) { throw new Refusal(`The tools are not JSON: ${error.message}`); }
  }
  return body;
}

// --- an answer

function stats(turn, usage) {
  const { began, first, last, pieces } = turn.times;
  if (!first) return "";
  const tokens = usage?.completion_tokens ?? pieces, about = usage ? "" : "≈ ";
  const seconds = (last - first) / 1000;
  const speed = tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : tokens / ((last - began) / 1000);
  const shown = speed >= 100 ? speed.toFixed(0) : speed.toFixed(1);
  const wait = first - began, waited = wait < 1000 ? `${wait.toFixed(0)} ms` : `${(wait / 1000).toFixed(2)} s`;
  return `${about}${shown} tokens/s · first after ${waited} · ${about}${tokens} tokens`;
}

function take(turn, choice) {
  const { delta } = choice, now = performance.now();
  if (delta.content) turn.content += delta.content;
  if (delta.reasoning_content) turn.reasoning = (turn.reasoning ?? "") + delta.reasoning_content;
  for (const part of delta.tool_calls ?? []) {
    const one = (turn.calls ??= [])[part.index] ??= { id: part.id, name: part.function.name, arguments: "" };
    one.arguments += part.function.arguments ?? "";
  }
  if (delta.content || delta.reasoning_content || delta.tool_calls) {
    turn.times.first ??= now;
    turn.times.last = now;
    turn.times.pieces += 1;
  }
  if (choice.finish_reason) turn.reason = choice.finish_reason;
}

async function answer() {
  running = new AbortController();
  busy(true);
  await listing; // a message may be sent before the models are known
  const body = request();
  const turn = { role: "assistant", content: "", model: chosen, times: { began: performance.now(), pieces: 0 } };
  talk.push(turn);
  follow(() => draw(turn));
  let usage = null, frame = 0, failed = null;
  const redraw = () => { frame = 0; turn.stats = stats(turn, usage); follow(() => draw(turn)); };
  try {
    const asked = { method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal };
    for await (const chunk of events(await call("/v1/chat/completions", asked))) {
      if (chunk.error) throw new Refusal(chunk.error.message);
      if (chunk.choices?.[0]) take(turn, chunk.choices[0]);
      usage = chunk.usage ?? usage;
      frame ||= requestAnimationFrame(redraw);
    }
  } catch (error) {
    if (error.name !== "AbortError") failed = error instanceof Refusal ? error.message : "The connection broke off.";
  }
  cancelAnimationFrame(frame);
  const stopped = running.signal.aborted;
  running = null;
  finish(turn, usage, failed, stopped);
}

function finish(turn, usage, failed, stopped) {
  turn.done = true;
  const end = stopped ? " · stopped" : failed ? " · broken off" : turn.reason === "length" ? " · the limit of tokens was reached" : "";
  turn.stats = stats(turn, usage) + end;
  if (stopped || failed) { // calls that are not whole cannot be answered
    turn.calls?.forEach((call) => call.part?.remove());
    delete turn.calls;
  }
  if (!turn.content && !turn.reasoning && !turn.calls && (failed || stopped)) takeBack(turn);
  else follow(() => draw(turn));
  busy(false);
  complain(failed ?? "");
  save();
  nameInput();
}

// nothing was answered: the text is in the input again
function takeBack(turn) {
  talk.pop();
  turn.part.remove();
  const asked = talk.pop();
  asked?.part.remove();
  if (asked && !$("text").value) { $("text").value = asked.content; grow(); }
  $("empty").hidden = talk.length > 0;
}

async function send() {
  const text = $("text").value;
  if (running || !text.trim()) return;
  try {
    request(); // complains before anything changes
  } catch (error) {
    complain(error.message);
    return;
  }
  const open = waiting()[0];
  const turn = open ? { role: "tool", content: text, call: open.id, name: open.name } : { role: "user", content: text };
  talk.push(turn);
  $("text").value = "";
  grow();
  complain("");
  $("talk").scrollTop = $("talk").scrollHeight;
  follow(() => draw(turn));
  save();
  nameInput();
  if (!waiting().length) await answer();
}

// --- the rest of the page

function busy(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
  $("clear").disabled = is;
  $("live").textContent = is ? "Answering …" : "";
}

function complain(text) {
  $("error").textContent = text;
  $("error").hidden = !text;
}

function showSettings(open) {
  $("settings").classList.toggle("open", open);
  $("toggle").setAttribute("aria-expanded", String(open));
}

function grow() {
  $("text").style.height = "auto";
  $("text").style.height = `${$("text").scrollHeight + 2}px`;
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
$("text").addEventListener("input", grow);
$("stop").addEventListener("click", () => { running?.abort(); $("text").focus(); });
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
$("clear").addEventListener("click", () => {
  talk = [];
  $("talk").replaceChildren();
  $("empty").hidden = false;
  complain("");
  save();
  nameInput();
  $("text").focus();
});
$("toggle").addEventListener("click", () => showSettings($("toggle").getAttribute("aria-expanded") === "false"));
$("model").addEventListener("change", () => { chosen = $("model").value; remember(); });
$("settings").addEventListener("input", remember);
$("options").addEventListener("submit", (event) => event.preventDefault());
$("key").addEventListener("change", () => { listing = listModels(); });
restore();
listing = listModels();
