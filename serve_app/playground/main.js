// The page: a conversation, what was asked for it, and the streams that come.

import { announce, copy, duration, find, make } from "./dom.js";
import { buildLegend, originOf } from "./evidence.js";
import { buildOptions, evidenceFields, getOptions, requestFields, setOptions, showDefaults, tabs } from "./options.js";
import { clear as forgetToken, startInspector } from "./inspector.js";
import { alter, prove } from "./proof.js";
import { ReplyView, added, newReply, saidBy } from "./reply.js";
import { Figures, startStrip, trouble } from "./strip.js";
import { events, json, keysComeFrom } from "./server.js";
import { fromAddress, startSharing } from "./share.js";
import * as history from "./history.js";

const SILENCE = 700; // milliseconds without a token after which one wonders
const SHORT = 16; // tokens of a completion that says nothing of its length
let about = null;
let conversation = null;
let stream = null; // of the replies that come: { controller, over }
const reader = { top: 0, atEnd: true }; // where the conversation is being read
let asksForKeys = false;

const mode = () => document.querySelector("input[name=mode]:checked").value;
const drawSeed = () => Number(crypto.getRandomValues(new BigUint64Array(1))[0] >> 16n);
const turnsShown = find("turns");

// -- a conversation -----------------------------------------------------------------------------

/** Ends the replies that come, and has them kept. */
async function stop() {
  stream.controller.abort();
  await stream.over;
}

async function begin(data = null) {
  if (stream) await stop();
  conversation = data ?? { id: history.newId(), mode: mode(), turns: [] };
  forgetToken();
  turnsShown.replaceChildren(...conversation.turns.map(turnElement));
  if (!conversation.turns.length) turnsShown.append(welcome());
  history.list(conversation.id, reopen);
  turnsShown.scrollTop = turnsShown.scrollHeight;
  Object.assign(reader, { top: 0, atEnd: true });
}

function welcome() {
  const tries = mode() === "chat"
    ? ["Tell me a story about a fox.", "I want to book a table for two tonight."]
    : ["Once upon a time", "The old sailor looked at the sea and"];
  return make("div", { className: "welcome" },
    make("h2", {}, mode() === "chat" ? "Talk to the model" : "Let the model go on"),
    make("p", {}, "Each word it says is shown with its proof."),
    make("div", { className: "tries" }, ...tries.map((text) => make("button",
      { type: "button", on: { click: () => { find("prompt").value = text; send(); } } }, text))));
}

async function reopen(id) {
  if (stream) await stop();
  const found = history.open(id);
  if (!found) return;
  setMode(found.mode);
  setOptions(found.options ?? {});
  begin(found);
}

function setMode(name) {
  document.querySelector(`input[name=mode][value=${name}]`).checked = true;
  const chat = name === "chat";
  find("prompt-label").textContent = chat ? "Message" : "Text to go on with";
  find("prompt").placeholder = chat ? "Say something" : "A text to go on with";
  find("option-max_tokens").placeholder = chat ? "as fits" : SHORT;
  document.body.classList.toggle("completing", !chat);
}

function turnElement(turn) {
  const said = make("div", { className: "said" }, turn.text);
  const views = turn.replies.map((reply) => viewOf(turn, reply));
  const replies = make("div", { className: "replies" }, ...views.map((view) => view.element));
  const element = make("section", { className: "turn", "aria-label": "A turn" }, said, replies);
  if (turn.mode === "completion") said.classList.add("prompt");
  settle(turn, element);
  return element;
}

function viewOf(turn, reply, live = false) {
  const name = turn.replies.length > 1 ? `Reply ${turn.replies.indexOf(reply) + 1}` : "Reply";
  const view = new ReplyView(reply, name, live);
  view.tokens.view = view;
  view.turn = turn;
  if (reply.branch) view.element.prepend(make("p", { className: "branch" }, reply.branch));
  return view;
}

/** Of several replies, the one that the conversation goes on with. */
const chosenOf = ({ chosen, replies }) => replies[chosen] ?? replies.find(({ error }) => !error) ?? replies[0];

/** Shows which reply of a turn is gone on with, and what can be done with each. */
function settle(turn, element) {
  const several = turn.mode === "chat" && turn.replies.length > 1;
  for (const { view } of element.querySelectorAll(".tokens")) {
    const left = several && view.reply !== chosenOf(turn);
    view.element.classList.toggle("left", left);
    view.offer({
      ...(view.reply.receipt ? { Prove: prove } : {}),
      ...(left ? { "Go on with this": choose } : {}),
      Regenerate: regenerate,
      Copy: ({ reply }) => copy(reply.text).then(() => announce("Copied")),
    });
  }
}

function choose({ turn, reply, element }) {
  if (stream) return;
  turn.chosen = turn.replies.indexOf(reply);
  settle(turn, element.closest(".turn"));
  history.keep(conversation);
  find("prompt").focus();
}

// -- what is asked ------------------------------------------------------------------------------

/** A text's request, as anybody may send it. */
function requestOf(text, options, turns, asked = mode()) {
  const made = originOf(about);
  const fields = { model: made.model, ...requestFields(options, asked) };
  fields.seed ??= drawSeed();
  if (asked === "completion") return { path: "v1/completions", made, body: { max_tokens: SHORT, ...fields, prompt: text } };
  const messages = options.system ? [{ role: "system", content: options.system }] : [];
  for (const turn of turns) {
    const said = turn.replies.length ? saidBy(chosenOf(turn)) : "";
    // Templates may want both sides by turns: what was never answered is left out.
    if (said) messages.push({ role: "user", content: turn.text }, { role: "assistant", content: said });
  }
  messages.push({ role: "user", content: text });
  return { path: "v1/chat/completions", made, body: { ...fields, messages } };
}

/** That; null, and told, where options cannot be read. */
function readRequest(...asked) {
  try {
    return requestOf(...asked);
  } catch (error) {
    announce(error.message, true);
    return null;
  }
}

async function send() {
  const text = find("prompt").value;
  if (!text.trim() || stream || !about) return;
  const options = getOptions();
  const request = readRequest(text, options, conversation.turns);
  if (!request) return;
  conversation.mode = mode();
  conversation.options = options;
  const turn = { text, mode: conversation.mode, replies: [] };
  turnsShown.querySelector(".welcome")?.remove();
  conversation.turns.push(turn);
  const element = turnElement(turn);
  turnsShown.append(element);
  find("prompt").value = "";
  element.scrollIntoView({ block: "end" });
  const many = request.body.n ?? 1;
  turn.replies = Array.from({ length: many }, () => newReply({ ...request }));
  await run(turn, element, turn.replies, options);
}

async function regenerate(view) {
  if (stream) return;
  const { turn } = view;
  const place = conversation.turns.indexOf(turn);
  const element = view.element.closest(".turn");
  const options = getOptions();
  const request = readRequest(turn.text, options, conversation.turns.slice(0, place), turn.mode);
  if (!request) return;
  if (place === conversation.turns.length - 1) conversation.options = options;
  forgetToken();
  turn.replies = Array.from({ length: request.body.n ?? 1 }, () => newReply({ ...request }));
  delete turn.chosen;
  element.querySelector(".replies").replaceChildren();
  await run(turn, element, turn.replies, options);
}

/** Another token was chosen: what came before stands, and the model goes on from there. */
async function branch(view, index, candidate) {
  if (stream) return;
  const { turn, reply } = view;
  const before = reply.tokens.slice(0, index).map((token) => ({ ...token, kept: true }));
  const own = { ...candidate, chosen: true, certificate: null, origin: null, end: about.end_token_ids.includes(candidate.id) };
  const tokens = [...before, own];
  const promptIds = reply.promptIds;
  const { messages, prompt, response_format: shape, tools, tool_choice: choice, n, min_tokens: least, ...fields } = reply.body;
  const body = { ...fields, prompt: [...promptIds, ...tokens.map((token) => token.id)] };
  const most = body.max_tokens ?? about.context - promptIds.length; // a chat says nothing: as many as fit
  body.max_tokens = Math.max(1, most - (tokens.length - reply.offset));
  const told = `Branches at token ${index + 1}` + (shape || tools ? "; no longer held to a schema or tools" : "");
  const next = newReply({ tokens, text: tokens.map((token) => token.text).join(""), promptIds, body,
    path: "v1/completions", made: reply.made, offset: tokens.length, branch: told });
  turn.replies.push(next);
  forgetToken();
  await run(turn, view.element.closest(".turn"), [next], getOptions());
}

/** The events of a reply; where this server can give none with a receipt, of one without. */
async function* proven(path, body, signal) {
  try {
    yield* events(path, body, signal);
  } catch (error) {
    if (error.parameter !== "receipt") throw error;
    const { receipt: _, ...rest } = body;
    yield* events(path, rest, signal);
  }
}

/** Streams into `replies`, which are shown in the turn's element as they come. */
function run(...asked) {
  stream = { controller: new AbortController() };
  stream.over = receive(stream.controller.signal, ...asked);
  return stream.over;
}

async function receive(signal, turn, element, replies, options) {
  const { path, body } = replies[0];
  const views = replies.map((reply) => viewOf(turn, reply, true));
  const place = element.querySelector(".replies");
  place.append(...views.map((view) => view.element));
  follow();
  sending(true);
  const decoders = replies.map(() => new TextDecoder());
  const figures = new Figures();
  let heard = figures.started;
  const watch = setInterval(() => {
    if (performance.now() - heard < SILENCE) return;
    const why = trouble();
    if (why) for (const view of views) view.pause(`Waiting, ${duration(performance.now() - heard)}: ${why}`);
  }, 250);
  const take = (choice, promptIds) => {
    const reply = replies[choice.index];
    if (reply.offset === 0) reply.promptIds ??= promptIds ?? choice.prompt_token_ids ?? null;
    const tokens = added(reply, choice, decoders[choice.index], about.end_token_ids);
    figures.add(tokens, heard);
    views[choice.index].append(tokens);
  };
  try {
    const asked = { ...body, ...evidenceFields(options), stream: true };
    for await (const batch of proven(path, asked, signal)) {
      heard = performance.now();
      for (const event of batch) for (const choice of event.choices) take(choice, event.prompt_token_ids);
      figures.show();
      follow();
    }
  } catch (error) {
    if (error.name !== "AbortError") for (const reply of replies) if (!reply.finish) reply.error = error.message;
  }
  clearInterval(watch);
  stream = null;
  sending(false);
  for (const view of views) {
    view.reply.milliseconds = heard - figures.started;
    view.finished();
  }
  if (replies[0].branch && !replies[0].error) turn.chosen = turn.replies.indexOf(replies[0]);
  settle(turn, element);
  announce(replies.find(({ error }) => error)?.error ?? "The reply is complete");
  history.keep(conversation);
  history.list(conversation.id, reopen);
}

function sending(now) {
  find("stop").hidden = !now;
  find("send").hidden = now;
  // A reader who is elsewhere by now stays there.
  const isFree = [document.body, find("stop")].includes(document.activeElement);
  if (!now && isFree) find("prompt").focus({ preventScroll: true });
}

/** Stays at the end, for a reader who is there: with the next frame, whose layout it then is. */
function follow() {
  requestAnimationFrame(() => { if (reader.atEnd) turnsShown.scrollTop = turnsShown.scrollHeight; });
}

// -- the page -----------------------------------------------------------------------------------

function askForKey(refused) {
  asksForKeys = true;
  const dialog = find("key-dialog");
  find("key-told").textContent = refused
    ? "The server refused that key. Look at it again."
    : "It stays in this page's memory and is gone when you leave.";
  find("key-told").classList.toggle("error", refused);
  find("key").value = "";
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve, reject) => {
    dialog.onclose = () => reject(new Error("This server asks for a key"));
    find("key-form").onsubmit = (event) => {
      event.preventDefault();
      resolve(find("key").value.trim());
      dialog.close();
    };
  });
}

function listen() {
  find("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  find("options").addEventListener("submit", (event) => event.preventDefault());
  find("prompt").addEventListener("keydown", (event) => {
    const composes = event.isComposing || event.keyCode === 229; // which Safari says of the last key alone
    if (event.key !== "Enter" || event.shiftKey || composes) return;
    event.preventDefault();
    send();
  });
  find("stop").addEventListener("click", () => stream?.controller.abort());
  turnsShown.addEventListener("scroll", () => {
    const { scrollTop: top, scrollHeight, clientHeight } = turnsShown;
    // What grows below is no way from the end.
    reader.atEnd = scrollHeight - top - clientHeight < 160 || (reader.atEnd && top >= reader.top);
    reader.top = top;
  }, { passive: true });
  addEventListener("pagehide", () => { if (stream) history.keep(conversation); });
  find("begin").addEventListener("click", () => begin());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && stream && !document.querySelector("dialog[open]")) stream.controller.abort();
  });
  for (const input of document.querySelectorAll("input[name=mode]")) {
    input.addEventListener("change", () => { setMode(mode()); begin(); });
  }
  for (const [name, shown] of [["marks", "marked"], ["ghosts", "haunted"]]) {
    const box = find(`option-${name}`);
    const show = () => document.body.classList.toggle(shown, box.checked);
    box.addEventListener("change", show);
    show();
  }
}

/** Begins with what the page's address asks for, if it does. */
async function takeLink() {
  const given = fromAddress();
  if (!given) return;
  setMode(given.mode === "completion" || !about.chats ? "completion" : "chat");
  setOptions(given.options ?? {});
  await begin();
  find("prompt").value = given.text;
}

async function start() {
  buildOptions();
  buildLegend();
  tabs();
  listen();
  keysComeFrom(askForKey);
  begin();
  for (;;) {
    try {
      about = await json("playground/about");
      break;
    } catch (error) {
      find("model").textContent = error.message;
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
  find("model").textContent = about.models[0];
  find("model").title = `head: ${about.head}; drafts: ${about.drafts}`;
  showDefaults(about.default_sampling);
  if (!about.chats) {
    find("tab-options").closest("body").querySelector("input[value=chat]").disabled = true;
    setMode("completion");
    begin();
  }
  startInspector(about, { branch, alter, busy: () => stream !== null });
  startStrip(about);
  await takeLink();
  addEventListener("hashchange", takeLink);
  startSharing(() => {
    // What is typed, else what was asked last, as it was asked.
    const last = find("prompt").value ? null : conversation.turns.at(-1);
    const options = last ? conversation.options : getOptions();
    const text = last?.text ?? find("prompt").value;
    const seed = last?.replies[0]?.body?.seed ?? options.seed;
    const request = requestOf(text, { ...options, seed }, last ? conversation.turns.slice(0, -1) : conversation.turns);
    const again = { ...options, seed: String(request.body.seed) };
    return { data: { mode: mode(), text, options: again }, hasKey: asksForKeys, ...request };
  });
  document.body.classList.add("ready");
}

start();
