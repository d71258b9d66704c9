"use strict";
// A chat is {id, changed, leaf, turns}: `leaf` is the id of the last turn on the page. A turn is {id, parent, role, content}; an answer also has its
// model, its thinking, its counts, the lengths of its texts that were not drafted, drafted, not drafted and so on (`runs`), and how it ended (`end`).
// Turns are only added: an edited message and a new answer are further children of the same parent. So nothing that was written is lost, and two
// windows may add to the same chat.
const find = id => document.getElementById(id);
// Name of a chat in the browser's storage, before its id.
const CHAT = "redrafter-chat-";
const SAMPLING = ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens"];
// Pauses between two drawings and two savings of an answer in progress, in ms.
const DRAW_PAUSE = 40, SAVE_PAUSE = 1000;
// Longest paragraph whose words have Markdown, in characters: the time for it may grow with the square.
const LONGEST_PARAGRAPH = 3000;
// Tokens of the context that are left for an answer, unless they are more than a quarter of it.
const ROOM = 1024;
// Tokens per character, until an answer has shown how many there are.
const USUAL_DENSITY = 1 / 3;
let models = [], running = null, chat = newChat(), isMarking = false, isLeaving = false;
// Chats that were deleted while this window was open, by id.
const deleted = new Map();
// Question that was refused for want of a key.
let refused = null;

// Failure that a person can act on; `kind` is "lost", "key", "context" or "server".
class Failure extends Error {
  constructor(kind, message) {
    super(message);
    this.kind = kind;
  }
}

// ---- Elements

function make(tag, kind = "", text = "") {
  const element = document.createElement(tag);
  element.className = kind;
  element.textContent = text;
  return element;
}

function button(name, act, label = "") {
  const element = make("button", "", name);
  element.type = "button";
  if (label) element.ariaLabel = label;
  element.addEventListener("click", () => act(element));
  return element;
}

// Act after a pause, which grows with the time that acting takes.
function paced(act, pause) {
  let timer = null, cost = 0;
  const run = () => {
    const start = performance.now();
    clearTimeout(timer);
    timer = null;
    act();
    cost = performance.now() - start;
  };
  return {soon: () => { timer ??= setTimeout(run, Math.max(pause, 4 * cost)); }, now: run};
}

// Follow the text only if the reader is at its end.
function following(change) {
  const log = find("log"), atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

async function copy(text, pressed) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // without https, browsers have the older way only
    const held = make("textarea", "unseen");
    held.value = text;
    pressed.after(held);
    held.select();
    done = document.execCommand("copy");
    held.remove();
    pressed.focus();
  }
  const name = pressed.textContent;
  pressed.textContent = find("status").textContent = done ? "Copied" : "Not copied: the browser refuses";
  setTimeout(() => { pressed.textContent = name; }, 2000);
}

function download(name, type, text) {
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([text], {type}));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// ---- Storage: the browser keeps chats and settings; the tab keeps the key, the message and which chat is open.

function read(storage, name) {
  try { return JSON.parse(storage.getItem(name)); } catch { return null; }
}

function write(storage, name, value) {
  try {
    if (value === null) storage.removeItem(name); else storage.setItem(name, JSON.stringify(value));
    return true;
  } catch { return false; }
}

// Read a chat. Those of an earlier page have turns in a row, with [text, kind] of every token.
function load(id) {
  const one = read(localStorage, CHAT + id), turns = one?.turns;
  if (!Array.isArray(turns) || !turns.length || turns.some(turn => typeof turn?.content !== "string")) return null;
  if ("leaf" in one) return one;
  const moved = turns.map(({parts = [], ...turn}, i) => {
    const runs = [];
    for (const [text, kind] of parts) addRun(runs, text.length, kind === "draft");
    return {...turn, id: `${i}`, parent: i ? `${i - 1}` : null, runs};
  });
  return {id: one.id, changed: one.changed, leaf: moved.at(-1).id, turns: moved};
}

// Add what another window has stored; return whether that lacks something of this one. An answer in both has the text of the window that writes it.
function merge(own) {
  const stored = new Map(load(own.id)?.turns.map(turn => [turn.id, turn]));
  let lacks = false;
  for (const mine of own.turns) {
    const other = stored.get(mine.id);
    stored.delete(mine.id);
    if (!other || (mine.end && !other.end)) lacks = true;
    else if (!mine.end && (other.end || other.content.length > mine.content.length)) Object.assign(mine, other);
  }
  own.turns.push(...stored.values());
  return lacks;
}

function saveTab() {
  write(sessionStorage, "redrafter-tab", {id: chat.id, key: find("key").value, text: find("text").value});
}

function save(own = chat) {
  if (!own.turns.length || deleted.has(own.id)) return;
  merge(own);
  if (write(localStorage, CHAT + own.id, {...own, changed: Date.now()})) {
    if (find("alert").dataset.kind === "full") tell();
  } else if (find("alert").dataset.kind !== "full") {
    tell("The browser's storage is full or switched off: this chat is not saved. Export it, or delete other chats.", "full",
      button("Export", exportJson));
  }
}

function saveSettings() {
  const values = Object.fromEntries(["system", ...SAMPLING].map(id => [id, find(id).value]));
  write(localStorage, "redrafter-options", {...values, isMarking});
}

function restore() {
  const settings = read(localStorage, "redrafter-options") ?? {system: read(localStorage, "redrafter-settings")?.system};
  for (const id of ["system", ...SAMPLING]) find(id).value = settings[id] ?? "";
  isMarking = settings.isMarking ?? false;
  const tab = read(sessionStorage, "redrafter-tab");
  find("key").value = tab?.key ?? "";
  open((tab && load(tab.id)) ?? newChat());
  find("text").value = tab?.text ?? "";
  saveTab();
}

// ---- The tree of turns

function newId() {  // crypto.randomUUID needs https
  return `${Date.now()}-${Math.random().toString(36).slice(2)}`;
}

function newChat() {
  return {id: newId(), leaf: null, turns: []};
}

// The turns from the first one to a leaf.
function path(own, leaf = own.leaf) {
  const found = [], byId = new Map(own.turns.map(turn => [turn.id, turn]));
  for (let turn = byId.get(leaf); turn; turn = byId.get(turn.parent)) found.unshift(turn);
  return found;
}

// The newest turn after a turn.
function newest(own, id) {
  for (let next; (next = own.turns.findLast(turn => turn.parent === id));) id = next.id;
  return id;
}

const title = own => own.turns[0]?.content.slice(0, 80) ?? "New chat";

// ---- Markdown: HTML in it is text, and what comes out of the parser is cleaned all the same.

marked.use({
  breaks: true,
  tokenizer: {
    html: () => undefined,
    tag(source) {
      const found = /^<br ?\/?>/i.exec(source);
      return found ? {type: "br", raw: found[0]} : undefined;
    },
  },
});

// Dozens of quotes or lists in each other, for which the parser's stack and time do not suffice.
const TOO_DEEP = /^[ \t]*((>|[+*-][ \t]|\d+[.)][ \t])[ \t]*){50}|^[ \t]{60,}([+*-]|\d+[.)])[ \t]/m;

class Lexer extends marked.Lexer {
  inlineTokens(source, tokens = []) {
    if (source.length <= LONGEST_PARAGRAPH) return super.inlineTokens(source, tokens);
    tokens.push({type: "text", raw: source, text: source});
    return tokens;
  }
}

const CLEAN = {
  ALLOWED_TAGS: ["a", "blockquote", "br", "code", "del", "em", "h3", "h4", "h5", "h6", "hr", "input", "li", "ol", "p", "pre", "strong", "table", "tbody",
    "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["align", "checked", "class", "disabled", "href", "start", "title", "type"],
  RETURN_DOM_FRAGMENT: true,
};

// Parse a text into blocks. Headings continue those of the page without a gap, and images become links.
function parse(text) {
  if (TOO_DEEP.test(text)) return [{type: "plain", raw: text}];
  const tokens = new Lexer(marked.defaults).lex(text);
  let depth = 2;
  marked.walkTokens(tokens, token => {
    if (token.type === "heading") token.depth = depth = Math.min(token.depth + 2, depth + 1, 6);
    if (token.type === "image") Object.assign(token, {type: "link", tokens: [{type: "text", text: token.text || token.href}]});
  });
  return tokens.filter(token => token.type !== "space");
}

function drawBlock(token) {
  if (token.type === "plain") return make("div", "block plain", token.raw);
  const block = make("div", "block");
  block.append(DOMPurify.sanitize(marked.parser([token]), CLEAN));
  for (const link of block.querySelectorAll("a")) Object.assign(link, {target: "_blank", rel: "noopener noreferrer"});
  for (const box of block.querySelectorAll("input")) box.ariaLabel = box.checked ? "done" : "to do";
  if (block.querySelector("table")) block.tabIndex = 0;  // it may scroll
  for (const pre of block.querySelectorAll("pre")) {
    const frame = make("div", "code"), bar = make("div", "bar"), code = pre.textContent;
    const language = /language-(\S+)/.exec(pre.firstChild.className)?.[1] ?? "text";
    bar.append(make("span", "", language), button("Copy", pressed => copy(code, pressed), `Copy ${language}`));
    pre.tabIndex = 0;
    pre.replaceWith(frame);
    frame.append(bar, pre);
  }
  return block;
}

// Draw a text; blocks that have not changed stay, with the reader's selection in them.
function drawText(body, text) {
  const blocks = parse(text), links = JSON.stringify(blocks.filter(one => one.type === "def"));
  const before = body.links === links ? body.blocks : [];
  let same = 0;
  while (same < blocks.length && blocks[same].raw === before[same]) same++;
  while (body.childNodes.length > same) body.lastChild.remove();
  body.append(...blocks.slice(same).map(drawBlock));
  body.blocks = blocks.map(one => one.raw);
  body.links = links;
}

// ---- Drafts: lengths of texts that were not drafted, drafted, not drafted, ...

function addRun(runs, length, isDraft) {
  while (!runs.length || runs.length % 2 === Number(isDraft)) runs.push(0);
  runs[runs.length - 1] += length;
}

// Find the drafted texts outside of code as ranges of the page. What Markdown has left of the text stands there in the same order.
function* draftRanges(body, {content, runs}) {
  const nodes = document.createTreeWalker(body, NodeFilter.SHOW_TEXT);
  let position = 0, run = 0, end = runs[0];
  while (nodes.nextNode()) {
    const node = nodes.currentNode, text = node.data.trim(), start = content.indexOf(text, position);
    if (!text || start < 0 || node.parentElement.closest(".bar")) continue;
    position = start + text.length;
    if (node.parentElement.closest("code")) continue;
    const offset = node.data.indexOf(text) - start;
    for (let from = start; from < position; from = Math.max(from, Math.min(end, position))) {
      while (end <= from) end += runs[++run];
      const to = Math.min(end, position);
      if (run % 2) yield new StaticRange({startContainer: node, startOffset: from + offset, endContainer: node, endOffset: to + offset});
    }
  }
}

function markDrafts() {
  if (!CSS.highlights) return;
  const ranges = isMarking ? [...find("turns").children].flatMap(one => one.turn.runs ? [...draftRanges(one.querySelector(".text"), one.turn)] : []) : [];
  CSS.highlights.set("drafts", new Highlight(...ranges));
  for (const one of document.querySelectorAll("[aria-pressed]")) one.ariaPressed = `${isMarking}`;
}

// ---- The page

function tell(text = "", kind = "", ...buttons) {
  find("alert").replaceChildren(text, ...buttons);
  find("alert").dataset.kind = kind;
}

// Show a chat; an answer in progress ends, and stays in its own chat.
function open(other) {
  running?.abort();
  running = refused = null;
  chat = other;
  chat.leaf = newest(chat, chat.leaf);  // the page may have been closed before a new answer began
  tell();
  draw();
  setRunning(false);
  find("log").scrollTop = find("log").scrollHeight;
  if (narrow.matches) showSide(false);
  find("text").focus();
  saveTab();
}

function draw() {
  const turns = path(chat), last = turns.at(-1);
  find("start").hidden = turns.length > 0;
  following(() => find("turns").replaceChildren(...turns.map(drawTurn)));
  if (last?.role === "user" && !running) find("turns").lastChild.querySelector(".actions").append(button("Answer", () => respond(last)));
  markDrafts();
  document.title = turns.length ? `${title(chat)} - redrafter-mlx` : "redrafter-mlx";
  listChats();
}

function drawTurn(turn) {
  const element = make("article", turn.role), body = make("div", "text"), actions = make("div", "actions");
  element.turn = turn;
  element.append(make("h2", "unseen", turn.role === "user" ? "You" : turn.model ?? "Model"), body, actions);
  if (turn.role === "user") {
    body.textContent = turn.content;
    actions.append(change("Edit", () => edit(turn, element)));
  } else {
    drawAnswer(turn, element);
  }
  actions.prepend(...versions(turn));
  return element;
}

function change(name, act, label) {
  const element = button(name, act, label);
  element.classList.add("change");
  return element;
}

// Draw what there is of an answer. While it is written, its element stays.
function drawAnswer(turn, element) {
  const body = element.querySelector(".text"), actions = element.querySelector(".actions"), isOpen = running?.turn === turn;
  body.classList.toggle("waiting", isOpen && !turn.content);
  drawText(body, turn.content);
  if (turn.reasoning) {
    if (!element.querySelector(".thinking")) {
      const folded = make("details", "thinking");
      folded.append(make("summary", "", "Thinking"), make("div"));
      body.before(folded);
    }
    element.querySelector(".thinking div").textContent = turn.reasoning;
  }
  if (!actions.querySelector(".speed")) actions.append(make("span", "speed"));
  actions.querySelector(".speed").textContent = counts(turn);
  if (isOpen) return;
  for (const note of [turn.leftOut > 0 && `The model's context is full: the ${turn.leftOut} oldest messages were left out of this answer.`, endOf(turn)]) {
    if (note) actions.before(make("p", "note", note));
  }
  const drafts = change("Show drafts", () => { isMarking = !isMarking; saveSettings(); markDrafts(); });
  drafts.ariaPressed = `${isMarking}`;
  actions.prepend(
    button("Copy", pressed => copy(turn.content, pressed)),
    change("Regenerate", () => respond(path(chat).find(one => one.id === turn.parent))),
    ...(turn.runs?.length > 1 && CSS.highlights ? [drafts] : []),
  );
}

function counts({tokens, steps, seconds, drafted}) {
  if (!tokens) return "";
  const rate = tokens > 1 && seconds ? `, ${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
  const gain = tokens > 1 && steps ? `, ${((tokens - 1) / steps).toFixed(2)} tokens/step` : "";
  return `${tokens} tokens, ${drafted} of them drafted${rate}${gain}`;
}

function endOf({end, context, most}) {
  if (end === "stopped") return "Stopped.";
  if (end === "lost") return "The connection to the server broke off here.";
  if (end === "failed") return "The server ended this answer.";
  if (!end) return "Unfinished: the page was closed, or another window is still writing.";
  if (end !== "length") return "";
  if (context) return `This answer ends here because the model's context of ${context.toLocaleString("en")} tokens is full.`;
  return `Cut at the maximum number of tokens${most ? ` (${most})` : ""}; raise it in Settings.`;
}

// Buttons that page through the versions of a turn.
function versions(turn) {
  const all = chat.turns.filter(one => one.parent === turn.parent && one.role === turn.role), at = all.indexOf(turn);
  if (at < 0 || all.length < 2) return [];  // nothing of a new answer has come
  const step = (sign, by, label) => {
    const go = change(sign, () => {
      chat.leaf = newest(chat, all[at + by].id);
      save();
      draw();
      const shown = [...find("turns").children].find(one => one.turn === all[at + by]);
      (shown.querySelector(`[aria-label="${label}"]:enabled`) ?? shown.querySelector(".version:enabled")).focus();
    }, label);
    go.classList.add("version");
    go.disabled = !all[at + by];
    return go;
  };
  return [step("‹", -1, "Earlier version"), make("span", "note", `${at + 1} of ${all.length}`), step("›", 1, "Later version")];
}

function edit(turn, element) {
  const form = make("form"), box = make("textarea"), send = make("button", "main", "Send");
  box.value = turn.content;
  box.ariaLabel = "Edited message";
  const cancel = () => { draw(); find("text").focus(); };
  form.append(box, send, button("Cancel", cancel));
  form.addEventListener("submit", event => {
    event.preventDefault();
    if (box.value.trim()) ask(box.value, turn.parent);
  });
  sendOnEnter(box, form);
  box.addEventListener("keydown", event => event.key === "Escape" && cancel());
  element.replaceChildren(form);
  box.focus();
}

function sendOnEnter(box, form) {
  box.addEventListener("keydown", event => {
    // Enter also ends the composing of a word, as in Japanese.
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229) {
      event.preventDefault();
      if (!running) form.requestSubmit();
    }
  });
}

const narrow = matchMedia("(max-width: 47rem)");

function showSide(isShown) {
  find("side").hidden = !isShown;
  find("menu").ariaExpanded = `${isShown}`;
}

function listChats() {
  let names = [];
  try { names = Object.keys(localStorage).filter(name => name.startsWith(CHAT)); } catch { /* no storage, which saving has said */ }
  const chats = [...names.map(name => load(name.slice(CHAT.length))).filter(Boolean), ...deleted.values()];
  chats.sort((one, other) => other.changed - one.changed);
  find("chats").replaceChildren(...chats.map(listChat));
  if (!chats.length) find("chats").append(make("li", "note", "No chat yet."));
}

function listChat(own) {
  const item = make("li");
  if (deleted.has(own.id)) {
    item.append(make("span", "note", `Deleted: ${title(own)}`), button("Undo", () => {
      deleted.delete(own.id);
      write(localStorage, CHAT + own.id, own);
      open(own);
    }));
    return item;
  }
  const name = button(title(own), () => own.id === chat.id || open(own));
  if (own.id === chat.id) name.ariaCurrent = "true";
  item.append(name, button("Delete", () => {
    deleted.set(own.id, own.id === chat.id ? chat : own);
    write(localStorage, CHAT + own.id, null);
    if (own.id === chat.id) open(newChat());
    listChats();
    [...find("chats").querySelectorAll("button")].find(one => one.textContent === "Undo")?.focus();
  }, `Delete ${title(own)}`));
  return item;
}

const fileName = () => `${title(chat).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40)}`;

function exportJson() {
  download(`${fileName()}.json`, "application/json", JSON.stringify(chat, null, 1));
}

function exportMarkdown() {
  const parts = path(chat).map(turn => `## ${turn.role === "user" ? "You" : turn.model ?? "Model"}\n\n${turn.content.trim()}\n`);
  download(`${fileName()}.md`, "text/markdown", `# ${title(chat).replaceAll("\n", " ")}\n\n${parts.join("\n")}`);
}

// ---- The server

const model = () => models.find(one => one.id === find("models").value) ?? models[0];

async function reach(promise) {
  try {
    return await promise;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("lost", "The server does not answer: it does not run any more, or cannot be reached. Start it again (redrafter-mlx serve).");
  }
}

async function request(path, options = {}) {
  const key = String.fromCharCode(...new TextEncoder().encode(find("key").value));  // as the server reads headers
  const headers = {"Content-Type": "application/json", ...(key && {Authorization: `Bearer ${key}`})};
  const response = await reach(fetch(path, {...options, headers}));
  if (response.ok) return response;
  if (response.status === 401) throw new Failure("key", "The server wants its key: type it into Settings.");
  const error = (await response.json().catch(() => null))?.error;
  const kind = error?.code === "context_length_exceeded" ? "context" : "server";
  throw new Failure(kind, error?.message ?? `The server answered with status ${response.status}.`);
}

async function learnModels() {
  const chosen = find("models").value;
  models = (await (await request("v1/models")).json()).data;
  find("models").replaceChildren(...models.map(one => new Option(one.id, one.id, false, one.id === chosen)));
  find("models").hidden = models.length < 2;
  find("model").hidden = models.length > 1;
  showModel();
}

function showModel() {
  const one = model(), context = one.context_length?.toLocaleString("en");
  const drafter = {lookup: "none; drafts come from repetitions in the text", none: "none"}[one.drafter] ?? one.drafter;
  find("model").textContent = one.id.split("/").at(-1);
  find("start").querySelector("h2").textContent = `Chat with ${one.id}`;
  const facts = {Context: context && `${context} tokens`, Drafter: drafter, Note: one.has_chat === false
    && "This model has no chat template: it continues each message alone."};
  if (one.state === "not_loaded") facts.Note = "The first message loads the model.";
  const rows = Object.entries(facts).filter(([, value]) => value);
  find("start").querySelector("dl").replaceChildren(...rows.flatMap(([name, value]) => [make("dt", "", name), make("dd", "", value)]));
  for (const id of SAMPLING) find(id).placeholder = one.defaults?.[id] ?? "";
  if (find("max_tokens").placeholder === "-1") find("max_tokens").placeholder = "no limit";
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = "";;) {
    const {value, done} = await reach(reader.read());
    if (done) await reach(Promise.reject(new Error("the stream has no end")));
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (!part.startsWith("data: ")) continue;
      const event = JSON.parse(part.slice(6));
      if (event.error) throw new Failure("server", event.error.message);
      yield event;
    }
  }
}

// How many of the oldest turns to leave out. The same ones stay out as long as the rest fits, so that the server has computed it before.
function leftOut(turns) {
  const context = model().context_length ?? Infinity, limit = context - Math.min(ROOM, context / 4);
  const before = turns.at(-2), length = from => turns.slice(from).reduce((sum, turn) => sum + turn.content.length, 0);
  let first = before?.leftOut ?? 0;
  const known = length(first) - turns.at(-1).content.length, tokens = before?.total - (before?.thought ?? 0);  // thinking is not sent again
  const density = tokens && known ? tokens / known : USUAL_DENSITY;
  if (density * length(first) <= limit) return first;
  while (first < turns.length - 1 && density * length(first) > limit * 0.75) first += 2;
  return first;
}

function bodyOf(turns) {
  const system = find("system").value, given = SAMPLING.filter(id => find(id).value !== "");
  const messages = turns.map(({role, content}) => ({role, content}));
  if (system) messages.unshift({role: "system", content: system});
  return {
    model: model().id,
    stream: true,
    stream_options: {include_drafts: true, include_usage: true},
    ...Object.fromEntries(given.map(id => [id, Number(find(id).value)])),
    ...(model().has_chat === false ? {prompt: turns.at(-1).content} : {messages}),
  };
}

// Send turns until the server takes them: less of them if they exceed the context, and as a text if it turns out that the model knows no chats.
async function post(turn, turns, signal) {
  await learnModels();  // another server may run by now, or the model have been loaded
  turn.leftOut = leftOut(turns);
  for (;;) {
    const body = bodyOf(turns.slice(turn.leftOut)), knew = model().has_chat;
    turn.model = body.model;
    turn.most = body.max_tokens ?? model().defaults?.max_tokens;
    try {
      return await request(body.messages ? "v1/chat/completions" : "v1/completions", {method: "POST", body: JSON.stringify(body), signal});
    } catch (error) {
      if (error.kind === "context" && body.messages && turn.leftOut < turns.length - 1) {
        turn.leftOut += 2 * Math.ceil((turns.length - turn.leftOut - 1) / 4);
      } else {
        if (error.kind === "context") error.message = `The message is too long for the model's context: shorten it with Edit. (${error.message})`;
        if (error.kind !== "server" || knew !== null) throw error;
        await learnModels();
        if (model().has_chat !== false) throw error;
      }
    }
  }
}

function addEvent(turn, event, start) {
  const choice = event.choices[0];
  if (event.usage) {
    turn.total = event.usage.prompt_tokens + event.usage.completion_tokens;
    turn.thought = event.usage.completion_tokens_details?.reasoning_tokens;
  }
  if (!choice) return;
  const delta = choice.delta ?? {content: choice.text};
  turn.reasoning += delta.reasoning ?? delta.reasoning_content ?? "";
  if (delta.content) addRun(turn.runs, delta.content.length, Boolean(choice.is_draft));
  turn.content += delta.content ?? "";
  turn.drafted += Boolean(choice.is_draft);
  turn.tokens = choice.tokens;
  turn.steps = choice.steps;
  turn.seconds = (performance.now() - start) / 1000;
  turn.end = choice.finish_reason ?? turn.end;
}

// Ask a question, after a turn.
function ask(text, parent) {
  const turn = {id: newId(), parent, role: "user", content: text};
  chat.turns.push(turn);
  return respond(turn);
}

// Answer a question; the answer belongs to its chat, whatever is on the page.
async function respond(question) {
  if (running) return;
  const own = chat, turn = {id: newId(), parent: question.id, role: "assistant", content: "", reasoning: "", runs: [], drafted: 0, end: null};
  const mine = running = Object.assign(new AbortController(), {turn}), shown = path(own).includes(question) ? own.leaf : question.id;
  own.leaf = question.id;
  setRunning(true);
  tell();
  draw();
  const element = drawTurn(turn);
  following(() => find("turns").append(element));
  find("log").scrollTop = find("log").scrollHeight;
  find("status").textContent = "The model is answering.";
  const drawing = paced(() => own === chat && running === mine && following(() => { drawAnswer(turn, element); markDrafts(); }), DRAW_PAUSE);
  const saving = paced(() => save(own), SAVE_PAUSE);
  saving.now();
  listChats();
  mine.save = saving.now;
  let failure = null, start = null;
  try {
    for await (const event of events(await post(turn, path(own), mine.signal))) {
      addEvent(turn, event, start ??= performance.now());
      if (own.leaf === question.id && (turn.content || turn.reasoning)) {
        own.turns.push(turn);
        own.leaf = turn.id;
      }
      drawing.soon();
      saving.soon();
    }
  } catch (error) {
    failure = error;
  }
  if (isLeaving) return;
  turn.end = failure ? {AbortError: "stopped"}[failure.name] ?? {lost: "lost"}[failure.kind] ?? "failed" : turn.end ?? "stop";
  if (turn.end === "length" && !(turn.tokens >= turn.most && turn.most > 0)) turn.context = turn.total;
  if (running === mine) running = null;
  if (own.leaf === question.id) own.leaf = shown;  // nothing has come: an earlier answer stays
  saving.now();
  if (own === chat) {
    draw();
    setRunning(false);
    if (failure) fail(failure, question);
    else find("status").textContent = turn.content;
  }
}

function fail(error, question) {
  if (error.name === "AbortError") {
    find("status").textContent = "Stopped.";
    return;
  }
  tell(error.message, error.kind, button("Try again", () => respond(question)));
  if (error.kind === "key") askKey(question);
  if (!error.kind) throw error;
}

function openSettings() {
  find("options").dataset.key = find("key").value;
  find("options").showModal();
}

// Ask for the key, and answer the question that was refused without.
function askKey(question = null) {
  refused = question;
  find("refused").hidden = false;
  openSettings();
  find("key").focus();
}

function setRunning(isRunning) {
  document.body.classList.toggle("running", isRunning);
  find("send").textContent = isRunning ? "Stop" : "Send";
  // Do not take the focus from elsewhere, nor open the keyboard of a phone.
  if (!isRunning && [document.body, find("send")].includes(document.activeElement) && !matchMedia("(pointer: coarse)").matches) find("text").focus();
}

// ---- Events

find("ask").addEventListener("submit", event => {
  event.preventDefault();
  const text = find("text").value, last = path(chat).at(-1);
  if (running) return running.abort();
  if (!text.trim()) return;
  find("text").value = "";
  saveTab();
  // A message that was not answered stays as a version of the next one.
  ask(text, last?.role === "user" ? last.parent : last?.id ?? null);
});
sendOnEnter(find("text"), find("ask"));
addEventListener("keydown", event => event.key === "Escape" && !find("options").open && running?.abort());
narrow.addEventListener("change", () => showSide(!narrow.matches));
find("new").addEventListener("click", () => open(newChat()));
find("menu").addEventListener("click", () => showSide(find("side").hidden));
find("markdown").addEventListener("click", exportMarkdown);
find("json").addEventListener("click", exportJson);
find("settings").addEventListener("click", openSettings);
find("options").addEventListener("close", async () => {
  const question = refused;
  find("refused").hidden = true;
  find("text").focus();
  if (find("key").value !== find("options").dataset.key && await reload(question) && question) respond(question);
});
find("models").addEventListener("change", showModel);
for (const id of ["system", ...SAMPLING]) find(id).addEventListener("input", saveSettings);
for (const id of ["key", "text"]) find(id).addEventListener("input", saveTab);
addEventListener("pagehide", () => {  // the browser breaks off the answer after this
  running?.save();
  isLeaving = true;
});
addEventListener("pageshow", event => event.persisted && location.reload());
addEventListener("storage", event => {  // of another window
  if (event.newValue) deleted.delete(event.key.slice(CHAT.length));
  if (event.key === CHAT + chat.id && event.newValue === null && chat.turns.length) {
    deleted.set(chat.id, chat);
    open(newChat());
    tell("This chat was deleted in another window.");
  } else if (event.key === CHAT + chat.id) {
    if (merge(chat) && !running) save();  // two windows have stored at the same time
    if (running || document.querySelector("article form")) return;
    chat.leaf = newest(chat, chat.leaf);
    draw();
  } else if (event.key?.startsWith(CHAT)) {
    listChats();
  }
});

// Ask for the models; return whether they came. For want of a key, ask for that, and answer the question later.
async function reload(question) {
  try {
    await learnModels();
    if (["lost", "key"].includes(find("alert").dataset.kind)) tell();
    return true;
  } catch (error) {
    tell(error.message, error.kind);
    if (error.kind === "key") askKey(question);
    if (!error.kind) throw error;
    return false;
  }
}

showSide(!narrow.matches);
restore();
reload();
