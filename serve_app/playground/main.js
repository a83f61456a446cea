// The page: a conversation, what was asked for it, and the streams that come.

import { announce, duration, find, make } from "./dom.js";
import { buildLegend } from "./evidence.js";
import { buildOptions, evidenceFields, getOptions, requestFields, setOptions, showDefaults } from "./options.js";
import { clear as forgetToken, startInspector } from "./inspector.js";
import { alter, prove } from "./proof.js";
import { ReplyView, added, newReply } from "./reply.js";
import { replyFigures, startStrip, trouble } from "./strip.js";
import { events, json, keysComeFrom } from "./server.js";
import { fromAddress, startSharing } from "./share.js";
import * as history from "./history.js";

const SILENCE = 700; // milliseconds without a token after which one wonders
let about = null;
let conversation = null;
let stream = null; // of the replies that come: { controller }
let asksForKeys = false;

const mode = () => document.querySelector("input[name=mode]:checked").value;
const drawSeed = () => Number(crypto.getRandomValues(new BigUint64Array(1))[0] >> 16n);
const turnsShown = find("turns");

// -- a conversation -----------------------------------------------------------------------------

function begin(data = null) {
  stream?.controller.abort();
  conversation = data ?? { id: crypto.randomUUID?.() ?? String(Date.now()), mode: mode(), turns: [] };
  forgetToken();
  turnsShown.replaceChildren(...conversation.turns.map(turnElement));
  if (!conversation.turns.length) turnsShown.append(welcome());
  history.list(conversation.id, reopen);
  turnsShown.scrollTop = turnsShown.scrollHeight;
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

function reopen(id) {
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
  document.body.classList.toggle("completing", !chat);
}

const actionsOf = (turn, reply) => ({
  ...(reply.receipt ? { Prove: prove } : {}),
  ...(turn.replies.length > 1 && turn.mode === "chat" ? { "Go on with this": choose } : {}),
  Regenerate: (view) => regenerate(view),
  Copy: (view) => navigator.clipboard?.writeText(view.reply.text).then(() => announce("Copied")),
});

function turnElement(turn) {
  const said = make("div", { className: "said" }, turn.text);
  const views = turn.replies.map((reply, i) => viewOf(turn, reply, i));
  const replies = make("div", { className: "replies" }, ...views.map((view) => view.element));
  const element = make("section", { className: "turn", "aria-label": "A turn" }, said, replies);
  if (turn.mode === "completion") said.classList.add("prompt");
  return element;
}

function viewOf(turn, reply, i, live = false) {
  const name = turn.replies.length > 1 ? `Reply ${i + 1}` : "Reply";
  const view = new ReplyView(reply, name, live ? {} : actionsOf(turn, reply), live);
  view.tokens.view = view;
  view.turn = turn;
  if (reply.branch) view.element.prepend(make("p", { className: "branch" }, reply.branch));
  return view;
}

const chosenOf = (turn) => turn.replies[turn.chosen] ?? turn.replies.at(-1);

/** Of several replies, the one that the conversation goes on with. */
function choose(view) {
  view.turn.chosen = view.turn.replies.indexOf(view.reply);
  for (const each of view.element.parentElement.children) each.classList.toggle("left", each !== view.element);
  history.keep(conversation);
  find("prompt").focus();
}

// -- what is asked ------------------------------------------------------------------------------

/** A text's request, as anybody may send it. */
function requestOf(text, options, turns, asked = mode()) {
  const fields = { model: about.models[0], ...requestFields(options, asked) };
  fields.seed ??= drawSeed();
  if (asked === "completion") return { path: "v1/completions", body: { ...fields, prompt: text } };
  const messages = options.system ? [{ role: "system", content: options.system }] : [];
  for (const turn of turns) {
    messages.push({ role: "user", content: turn.text });
    const reply = chosenOf(turn);
    if (reply?.text) messages.push({ role: "assistant", content: reply.text });
  }
  messages.push({ role: "user", content: text });
  return { path: "v1/chat/completions", body: { ...fields, messages } };
}

async function send() {
  const text = find("prompt").value;
  if (!text.trim() || stream) return;
  const options = getOptions();
  let request;
  try {
    request = requestOf(text, options, conversation.turns);
  } catch (error) {
    find("prompt").setCustomValidity(error.message);
    find("prompt").reportValidity();
    return;
  }
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
  const request = requestOf(turn.text, options, conversation.turns.slice(0, place), turn.mode);
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
  if (body.max_tokens) body.max_tokens = Math.max(1, body.max_tokens - tokens.length);
  const told = `Branches at token ${index + 1}` + (shape || tools ? "; no longer held to a schema or tools" : "");
  const next = newReply({ tokens, text: tokens.map((token) => token.text).join(""), promptIds, body,
    path: "v1/completions", offset: tokens.length, branch: told });
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
async function run(turn, element, replies, options) {
  const { path, body } = replies[0];
  const views = replies.map((reply) => viewOf(turn, reply, turn.replies.indexOf(reply), true));
  const place = element.querySelector(".replies");
  place.append(...views.map((view) => view.element));
  follow();
  const controller = new AbortController();
  stream = { controller };
  sending(true);
  const decoders = replies.map(() => new TextDecoder());
  const started = performance.now();
  let heard = started;
  const watch = setInterval(() => {
    if (performance.now() - heard < SILENCE) return;
    const why = trouble();
    if (why) for (const view of views) view.pause(`Waiting, ${duration(performance.now() - heard)}: ${why}`);
  }, 250);
  const take = (choice, promptIds, now) => {
    const reply = replies[choice.index];
    if (reply.offset === 0) reply.promptIds ??= promptIds ?? choice.prompt_token_ids ?? null;
    const tokens = added(reply, choice, decoders[choice.index], about.end_token_ids);
    if (tokens.length) reply.first ??= now;
    views[choice.index].append(tokens);
    views[choice.index].progress();
  };
  try {
    const asked = { ...body, ...evidenceFields(options), stream: true };
    for await (const batch of proven(path, asked, controller.signal)) {
      heard = performance.now();
      for (const event of batch) for (const choice of event.choices) take(choice, event.prompt_token_ids, heard);
      replyFigures(replies, started, heard);
      follow();
    }
  } catch (error) {
    if (error.name !== "AbortError") for (const reply of replies) if (!reply.finish) reply.error = error.message;
  }
  clearInterval(watch);
  stream = null;
  sending(false);
  for (const [i, reply] of replies.entries()) {
    reply.milliseconds = heard - started;
    const view = viewOf(turn, reply, turn.replies.indexOf(reply));
    views[i].element.replaceWith(view.element);
  }
  announce(replies[0].error ?? "The reply is complete");
  history.keep(conversation);
  history.list(conversation.id, reopen);
}

function sending(now) {
  find("stop").hidden = !now;
  find("send").hidden = now;
  if (!now) find("prompt").focus({ preventScroll: true });
}

/** Stays at the end, for who is there. */
function follow() {
  const left = turnsShown.scrollHeight - turnsShown.scrollTop - turnsShown.clientHeight;
  if (left < 160) requestAnimationFrame(() => (turnsShown.scrollTop = turnsShown.scrollHeight));
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

function tabs() {
  const pairs = [["tab-options", "options-panel"], ["tab-history", "history"]];
  const choose = (chosen) => {
    for (const [tab, panel] of pairs) {
      find(tab).setAttribute("aria-selected", String(tab === chosen));
      find(tab).tabIndex = tab === chosen ? 0 : -1;
      find(panel).hidden = tab !== chosen;
    }
  };
  for (const [i, [tab]] of pairs.entries()) {
    find(tab).addEventListener("click", () => choose(tab));
    find(tab).addEventListener("keydown", (event) => {
      if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
      const [other] = pairs[1 - i];
      choose(other);
      find(other).focus();
    });
  }
  const show = (open) => {
    document.body.classList.toggle("options-open", open);
    find("show-options").setAttribute("aria-expanded", String(open));
    (open ? find("tab-options") : find("show-options")).focus();
  };
  find("show-options").addEventListener("click", () => show(!document.body.classList.contains("options-open")));
  find("hide-options").addEventListener("click", () => show(false));
}

function listen() {
  find("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  find("options").addEventListener("submit", (event) => event.preventDefault());
  find("prompt").addEventListener("input", () => find("prompt").setCustomValidity(""));
  find("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  find("stop").addEventListener("click", () => stream?.controller.abort());
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
  const given = fromAddress();
  if (given) {
    setMode(given.mode === "completion" ? "completion" : "chat");
    setOptions(given.options ?? {});
    begin();
    find("prompt").value = given.text;
  }
  startSharing(() => {
    const last = conversation.turns.at(-1);
    const text = find("prompt").value || last?.text || "";
    const options = { ...getOptions() };
    const seed = last?.replies.at(-1)?.body?.seed;
    if (seed !== undefined) options.seed ??= String(seed);
    const earlier = find("prompt").value ? conversation.turns : conversation.turns.slice(0, -1);
    return { data: { mode: mode(), text, options }, hasKey: asksForKeys, ...requestOf(text, options, earlier) };
  });
  document.body.classList.add("ready");
}

start();
