// Conversations, kept in this browser as far as there is room.

import { find, make } from "./dom.js";
import { newReply } from "./reply.js";
import { packed, unpacked } from "./evidence.js";

const KEY = "lexshard-conversations";
const MOST = 50;

export const newId = () => crypto.randomUUID?.() ?? String(Date.now());

function stored() {
  try {
    return JSON.parse(localStorage.getItem(KEY)).filter(({ turns }) => Array.isArray(turns));
  } catch {
    return []; // nothing yet, or what the page did not write
  }
}

/** Whether the first has room; the oldest go for it. Where it has none even alone, nothing changes. */
function write(all) {
  const texts = all.slice(0, MOST).map((each) => JSON.stringify(each));
  for (; texts.length; texts.pop()) {
    try {
      localStorage.setItem(KEY, `[${texts.join(",")}]`);
      return true;
    } catch {
      // no room: the oldest goes
    }
  }
  return false;
}

// What was asked is in the turns: each body would hold all that was said before it again.
function lasting({ altered: _, body, ...reply }) {
  const { messages, prompt, ...fields } = body ?? {};
  return { ...reply, body: fields, tokens: reply.tokens.map(packed) };
}

/** Keeps a conversation as it is now. */
export function keep(conversation) {
  if (!conversation.turns.length) return;
  const all = stored();
  const there = all.find(({ id }) => id === conversation.id);
  // Another tab went on with it: both stay.
  if (there && there.version !== conversation.version) conversation.id = newId();
  const own = {
    ...conversation,
    version: (conversation.version ?? 0) + 1,
    turns: conversation.turns.map((turn) => ({ ...turn, replies: turn.replies.map(lasting) })),
  };
  const fits = write([own, ...all.filter(({ id }) => id !== own.id)]);
  if (fits) conversation.version = own.version;
  find("kept").textContent = fits
    ? "Kept in this browser alone."
    : "What was said last is not kept: this browser has no room for all of it.";
}

function forget(id) {
  const others = stored().filter((each) => each.id !== id);
  if (others.length) write(others);
  else localStorage.removeItem(KEY);
}

export function open(id) {
  const found = stored().find((each) => each.id === id);
  if (!found) return null;
  const revived = (reply) => newReply({ ...reply, tokens: reply.tokens.map(unpacked) });
  return { ...found, turns: found.turns.map((turn) => ({ ...turn, replies: turn.replies.map(revived) })) };
}

export function list(current, choose) {
  const all = stored();
  const rows = all.map(({ id, mode, turns }) => {
    const title = (turns[0]?.text ?? "").slice(0, 60) || "(nothing)";
    const pick = make("button", { type: "button", className: "pick", on: { click: () => choose(id) } },
      make("span", {}, title), make("small", {}, `${mode}, ${turns.length === 1 ? "1 turn" : `${turns.length} turns`}`));
    if (id === current) pick.setAttribute("aria-current", "true");
    const drop = make("button", { type: "button", className: "quiet close", "aria-label": `Forget ${title}`,
      on: { click: () => { forget(id); list(current, choose); } } }, "✕");
    return make("li", {}, pick, drop);
  });
  find("conversations").replaceChildren(...rows);
  if (!rows.length) find("conversations").append(make("li", { className: "note" }, "Nothing yet."));
}
