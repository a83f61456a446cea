// One reply on the page: its tokens as they come, and what can be done with it.

import { classOf } from "./evidence.js";
import { count, duration, make, textOf } from "./dom.js";

const MOST_TOKENS = 400; // of a block without a line's end
const LEAST_TOKENS = 100;
const LETTERS = 90; // of a line, about, for the height of a block that was never seen
const LINE = 1.85; // times the size of a letter
const ENDS = { stop: "ended by itself", length: "as long as was asked for", tool_calls: "calls tools" };

/** A reply as data: what is kept of it. */
export function newReply(more = {}) {
  return { tokens: [], text: "", calls: [], finish: null, receipt: null, promptIds: null,
    error: null, body: null, path: null, made: null, offset: 0, milliseconds: null, ...more };
}

/** What a chunk of a stream adds to `reply`; returns its new tokens. */
export function added(reply, choice, decoder, endIds) {
  const ids = choice.token_ids ?? [];
  const tokens = ids.map((id, i) => {
    const end = endIds.includes(id);
    const bytes = new Uint8Array(choice.token_bytes?.[i] ?? []);
    return {
      id, end, text: end ? "" : decoder.decode(bytes, { stream: true }),
      certificate: choice.certificates?.[i] ?? null, origin: choice.drafts?.[i] ?? null,
      ghost: choice.rejected_bytes?.[i] ? textOf(choice.rejected_bytes[i]) : null,
    };
  });
  reply.tokens.push(...tokens);
  reply.text += choice.text ?? choice.delta?.content ?? "";
  for (const piece of choice.delta?.tool_calls ?? []) {
    const own = (reply.calls[piece.index] ??= { name: "", text: "" });
    own.name = piece.function?.name ?? piece.custom?.name ?? own.name;
    own.text += piece.function?.arguments ?? piece.custom?.input ?? "";
  }
  reply.finish = choice.finish_reason ?? reply.finish;
  reply.receipt = choice.receipt ?? reply.receipt;
  reply.error = choice.error?.message ?? reply.error;
  return tokens;
}

/** What a conversation goes on with of a reply: its text, or calls as the model wrote them. */
export const saidBy = ({ calls, text, tokens }) => (calls.length ? tokens.map((token) => token.text).join("") : text);

const shownOf = (token) => (token.end ? "■" : token.text);

export class ReplyView {
  constructor(reply, name, live = false) {
    this.reply = reply;
    this.spans = [];
    this.live = live;
    this.told = make("p", { className: "told" });
    this.tokens = make("div", {
      className: "tokens", tabIndex: 0, role: "group",
      "aria-label": `${name}: tokens. Arrow keys go from one to the next, Enter looks into one`,
    });
    this.buttons = make("div", { className: "actions" });
    this.after = make("div", { className: "after" });
    this.element = make("article", { className: "reply", "aria-label": name },
      this.tokens, this.after, make("footer", {}, this.told, this.buttons));
    this.element.classList.toggle("live", live);
    this.waiting = [];
    this.block = null;
    this.append(reply.tokens);
    this.flush();
    if (!live) this.finished();
  }

  /** What can be done with the reply now. */
  offer(actions) {
    this.buttons.replaceChildren(...Object.entries(actions).map(([label, run]) =>
      make("button", { type: "button", className: "quiet", on: { click: () => run(this) } }, label)));
  }

  /** Tokens appear with the next frame, however many came since the last. */
  append(tokens) {
    this.waiting.push(...tokens);
    if (!this.frame && this.waiting.length) {
      this.frame = requestAnimationFrame(() => this.flush());
    }
  }

  flush() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    let fragment = document.createDocumentFragment();
    for (const token of this.waiting) {
      if (this.block === null || this.isFull(token)) {
        this.close(fragment);
        fragment = document.createDocumentFragment();
        this.block = make("div", { className: "block" });
        this.held = this.letters = 0;
        this.tokens.append(this.block);
      }
      if (token.ghost) fragment.append(make("del", { className: "ghost" }, token.ghost));
      fragment.append(this.span(token));
      this.held += 1;
      this.ended = token.text.endsWith("\n");
      this.letters += token.text.length + (this.ended ? LETTERS / 2 : 0);
    }
    this.close(fragment);
    this.waiting = [];
    if (this.live) this.told.textContent = `${count(this.spans.length)} tokens`;
  }

  close(fragment) {
    if (!this.block) return;
    this.block.append(fragment);
    this.block.style.containIntrinsicHeight = `auto ${Math.ceil(this.letters / LETTERS) * LINE}em`;
  }

  isFull(token) {
    if (this.ended && this.held >= LEAST_TOKENS) return true;
    return this.held >= MOST_TOKENS && token.text.startsWith(" ");
  }

  span(token) {
    const span = document.createElement("span");
    span.className = classOf(token);
    span.textContent = shownOf(token);
    span.token = this.spans.length;
    this.spans.push(span);
    return span;
  }

  /** Shows a token anew: altered, proven, or looked at. */
  mark(index, name, on = true) {
    this.spans[index]?.classList.toggle(name, on);
  }

  clearMarks(...names) {
    for (const span of this.spans) span.classList.remove(...names);
  }

  /** Shows another token in the place of one. */
  replace(index, token) {
    this.spans[index].textContent = shownOf(token);
  }

  pause(why) {
    if (this.reply.finish === null) this.told.textContent = why;
  }

  finished() {
    this.flush();
    this.live = false;
    this.element.classList.remove("live");
    const { reply } = this;
    const parts = [`${count(reply.tokens.length)} tokens`, ENDS[reply.finish] ?? (reply.error ? "" : "stopped")];
    if (reply.milliseconds !== null) parts.push(duration(reply.milliseconds));
    if (reply.body?.seed !== undefined) parts.push(`seed ${reply.body.seed}`);
    this.told.textContent = parts.filter(Boolean).join(" · ");
    const cards = reply.calls.filter(Boolean).map((call) => make("figure", { className: "call" },
      make("figcaption", {}, `Calls ${call.name}`), make("code", {}, call.text)));
    const error = reply.error ? make("p", { className: "error", role: "alert" }, reply.error) : null;
    this.after.replaceChildren(...[...cards, error].filter(Boolean));
  }
}
