// Conversations, kept in this browser as far as there is room.

import { find, make } from "./dom.js";
import { newReply } from "./reply.js";
import { packed, unpacked } from "./evidence.js";

const KEY = "lexshard-conversations";
const MOST = 50;

function stored() {
  try {
    return JSON.parse(localStorage.getItem(KEY)) ?? [];
  } catch {
    return [];
  }
}

function write(all) {
  let kept = all.slice(0, MOST);
  while (kept.length) {
    try {
      localStorage.setItem(KEY, JSON.stringify(kept));
      return;
    } catch {
      kept = kept.slice(0, -1); // no room: the oldest goes
    }
  }
  localStorage.removeItem(KEY);
}

const lasting = ({ altered: _, ...reply }) => ({ ...reply, tokens: reply.tokens.map(packed) });

/** Keeps a conversation as it is now. */
export function keep(conversation) {
  if (!conversation.turns.length) return;
  const own = {
    ...conversation,
    turns: conversation.turns.map((turn) => ({ ...turn, replies: turn.replies.map(lasting) })),
  };
  write([own, ...stored().filter((each) => each.id !== conversation.id)]);
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
      on: { click: () => { write(stored().filter((each) => each.id !== id)); list(current, choose); } } }, "✕");
    return make("li", {}, pick, drop);
  });
  find("conversations").replaceChildren(...rows);
  if (!rows.length) find("conversations").append(make("li", { className: "note" }, "Nothing yet."));
}
