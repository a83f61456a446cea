// The evidence of one token: what was asked of the head, what it cost, and what else could have
// been said there. Candidates are computed when one looks, never while a reply is made.

import { KINDS, classOf, facts, kindOf, originOf } from "./evidence.js";
import { announce, find, make, percent, textOf, visible } from "./dom.js";
import { json } from "./server.js";

const SHOWN = 8;
const DWELL = 220; // milliseconds that a pointer rests before candidates are computed

let current = null; // { view, index, pinned }
let server = null;
let acts = {};
let timer = 0;
let asked = null;
let pointer = ""; // where it was: what scrolls under one that rests is not looked at

/** `actions`: what a candidate may be used for, `branch` and `alter`; `busy` whether a reply comes. */
export function startInspector(about, actions) {
  server = about;
  acts = actions;
  const turns = find("turns");
  turns.addEventListener("pointerover", (event) => {
    const [before, place] = [pointer, placeOf(event.target)];
    pointer = `${event.screenX} ${event.screenY}`;
    if (place && pointer !== before && !current?.pinned && event.pointerType !== "touch") look(place, false);
  });
  turns.addEventListener("click", (event) => {
    const place = placeOf(event.target);
    if (place && getSelection().isCollapsed) look(place, true);
  });
  turns.addEventListener("keydown", moved);
  clear();
}

function placeOf(target) {
  const tokens = target.closest?.(".tokens");
  if (!tokens || target.token === undefined) return null;
  return { view: tokens.view, index: target.token };
}

function moved(event) {
  const tokens = event.target.closest?.(".tokens");
  if (!tokens || event.target !== tokens || event.altKey || event.ctrlKey || event.metaKey) return;
  const { view } = tokens;
  const here = current?.view === view ? current.index : -1;
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };
  if (event.key in steps && view.spans.length) {
    const index = Math.min(view.spans.length - 1, Math.max(0, here + steps[event.key]));
    look({ view, index }, false);
    view.spans[index].scrollIntoView({ block: "nearest" });
    event.preventDefault();
  } else if (event.key === "Enter" && here >= 0) {
    look({ view, index: here }, true);
    find("inspector").querySelector("button, [tabindex]")?.focus();
    event.preventDefault();
  }
}

export function clear() {
  current?.view.mark(current.index, "seen", false);
  current = null;
  find("evidence").classList.remove("open");
  find("inspector").replaceChildren(
    make("h2", {}, "Every token can say why"),
    make("p", { className: "note" },
      "Point at a word, tap it, or go to it with the arrow keys: what was asked of the output head, " +
      "how little of it was read, and what else could have been said."),
    make("p", { className: "note" }, "Choose another candidate there, and the reply branches."));
}

/** Shows what is known of a token; a pinned one stays until another is chosen. */
export function look({ view, index }, pinned) {
  if (current?.view === view && current.index === index && current.pinned === pinned) return;
  current?.view.mark(current.index, "seen", false);
  current = { view, index, pinned };
  view.mark(index, "seen");
  const token = view.reply.tokens[index];
  const kind = kindOf(token);
  const name = token.end ? "end" : visible(token.text);
  const close = make("button", { type: "button", className: "quiet close", "aria-label": "Close" , on: { click: closed }}, "✕");
  const parts = [
    make("div", { className: "row" },
      make("h2", { className: "token-name" }, make("span", { className: classOf(token) }, name)),
      close),
    make("p", { className: "where" }, `Token ${index + 1} of ${view.reply.tokens.length}, id ${token.id}`),
    make("p", { className: "verdict" }, KINDS[kind][1]),
  ];
  const lines = facts(token, view.reply);
  parts.push(make("dl", { className: "facts" }, ...lines.map(([name, value]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, value)))));
  const table = make("div", { id: "candidates", className: "candidates" });
  parts.push(table);
  find("inspector").replaceChildren(...parts);
  find("evidence").classList.toggle("open", pinned);
  announce(`${name}: ${KINDS[kind][0]}`);
  clearTimeout(timer);
  asked?.abort();
  if (pinned) candidates(view, index, table);
  else if (!acts.busy()) timer = setTimeout(() => candidates(view, index, table), DWELL);
}

function closed() {
  const { view } = current;
  clear();
  view.tokens.focus();
}

/** What the request was that would draw this token next, and nothing after it. */
function upTo({ promptIds, tokens }, index) {
  return [...promptIds, ...tokens.slice(0, index).map((token) => token.id)];
}

async function candidates(view, index, table) {
  const { reply } = view;
  if (!reply.promptIds) return;
  if (JSON.stringify(reply.made) !== JSON.stringify(originOf(server))) {
    table.replaceChildren(make("p", { className: "note" },
      `${reply.made?.model ?? "Another model"} said this, which is not served here: nothing can be computed at this place.`));
    return;
  }
  asked = new AbortController();
  table.replaceChildren(make("p", { className: "note" }, "Computing every logit at this place …"));
  try {
    const prompt = upTo(reply, index);
    const own = { prompt, max_tokens: 1, temperature: 0, candidates: SHOWN, priority: 1, ignore_eos: true };
    const answer = await json("v1/completions", own, asked.signal);
    const drawn = reply.tokens[index].id;
    let [{ top }] = answer.choices[0].candidates;
    if (!top.some((each) => each.token_id === drawn)) {
      const bias = { ...own, candidates: 1, allowed_token_ids: [drawn] };
      const forced = await json("v1/completions", bias, asked.signal);
      top = [...top, { ...forced.choices[0].candidates[0], far: true }];
    }
    table.replaceChildren(...shown(top, view, index));
  } catch (error) {
    if (error.name !== "AbortError") table.replaceChildren(make("p", { className: "error" }, error.message));
  }
}

function shown(top, view, index) {
  const drawn = view.reply.tokens[index].id;
  const rows = top.map((each, i) => {
    const text = textOf(each.bytes);
    const next = top[i + 1]; // others stand between the likeliest and one that is far
    const gap = next && !next.far ? (each.logit - next.logit).toFixed(3) : "";
    const name = visible(text);
    const own = each.token_id === drawn;
    const use = (label, run) => make("button", { type: "button", className: "quiet", title: `${label} with ${name}`,
      "aria-label": `${label} with ${name}`, on: { click: () => run(view, index, { id: each.token_id, text }) } }, label);
    const isProven = view.reply.receipt && index >= view.reply.offset;
    const buttons = view.live ? [] : [use("Branch", acts.branch), isProven ? use("Alter", acts.alter) : ""];
    return make("tr", { className: own ? "drawn" : "" },
      make("th", { scope: "row", className: "word", title: name }, name),
      make("td", {}, each.logit.toPrecision(9)), make("td", {}, gap),
      make("td", { title: `log-probability ${each.logprob}` }, each.logprob.toFixed(3)),
      make("td", { className: "use" }, ...(own ? [make("span", { className: "tag" }, "drawn")] : buttons)));
  });
  const chosen = top.find((each) => each.token_id === drawn);
  const chance = chosen ? percent(Math.exp(chosen.logprob), 2) : "";
  const caption = `The model alone says it with probability ${chance}: before temperature, penalties and grammars.`;
  return [make("table", {},
    make("caption", {}, "Candidates, by exact logit"),
    make("thead", {}, make("tr", {}, ...["Token", "Logit", "To next", "Log-prob."].map((name) => make("th", { scope: "col" }, name)), make("td", {}))),
    make("tbody", {}, ...rows)), make("p", { className: "note" }, caption)];
}
