// A reply is made again from its receipt, beside itself: a tick for each token that comes out equal.

import { announce, count, make, visible } from "./dom.js";
import { events } from "./server.js";

const TICKS = 24; // of one frame, so that one sees them run
const REASONS = {
  altered: "Altered",
  "other model": "Another model's",
  "other tokenizer": "Another tokenizer's",
  "other arithmetic": "Of another arithmetic",
  "not its own": "Not its own",
};

/** Puts another token into the reply's receipt, as somebody might who wants it to have said so. */
export function alter(view, index, candidate) {
  const { reply } = view;
  reply.altered = { ...reply.altered, [index]: candidate };
  forget(view);
  view.replace(index, candidate);
  view.mark(index, "altered");
  const undo = make("button", { type: "button", className: "quiet", on: { click: () => restore(view) } }, "Undo");
  view.after.append(make("p", { className: "proof open" },
    `Token ${index + 1} now reads ${visible(candidate.text)} in text and receipt. Prove it to see. `, undo));
  announce("Altered. Prove the reply to see it found");
}

function restore(view) {
  for (const index of Object.keys(view.reply.altered ?? {})) {
    view.replace(Number(index), view.reply.tokens[index]);
    view.mark(Number(index), "altered", false);
  }
  view.reply.altered = {};
  forget(view);
}

function forget(view) {
  view.clearMarks("equal", "wrong");
  for (const line of view.after.querySelectorAll(".proof")) line.remove();
}

function receiptOf({ receipt, altered = {}, offset }) {
  const changes = Object.entries(altered);
  if (!changes.length) return receipt;
  const { signature: _, ...unsigned } = receipt; // who alters a receipt cannot sign it
  const output = [...receipt.output_ids];
  for (const [index, candidate] of changes) output[index - offset] = candidate.id;
  return { ...unsigned, output_ids: output };
}

export async function prove(view) {
  const { reply } = view;
  if (!reply.receipt) return;
  forget(view);
  const line = make("p", { className: "proof", role: "status" }, "The server makes it again …");
  view.after.append(line);
  let shown = 0;
  let equal = 0;
  let verdict = null;
  const ticked = ticking(view, line, () => [shown, equal, verdict], (next) => (shown = next));
  try {
    const body = { receipts: [receiptOf(reply)], stream: true };
    for await (const batch of events("v1/receipts/verify", body)) {
      for (const event of batch) {
        equal = event.equal_tokens;
        if (event.object === "receipt.verdict") verdict = event;
      }
    }
    await ticked;
    if (!line.isConnected) return; // it was altered meanwhile: the verdict is another text's
    line.className = verdict.equal ? "proof equal" : "proof wrong";
    line.textContent = sentence(verdict, reply);
    if (!verdict.equal) view.mark(reply.offset + verdict.equal_tokens, "wrong");
    announce(line.textContent);
  } catch (error) {
    verdict = { equal: false };
    line.className = "proof wrong";
    line.textContent = `It could not be made again: ${error.message}`;
  }
}

/** Resolves once every token that is known to be equal has its tick, or `line` is gone. */
function ticking(view, line, state, move) {
  return new Promise((resolve) => {
    const frame = () => {
      if (!line.isConnected) return resolve();
      const [shown, equal, verdict] = state();
      const next = Math.min(equal, shown + Math.max(TICKS, Math.ceil((equal - shown) / 40)));
      for (let i = shown; i < next; i++) view.mark(view.reply.offset + i, "equal");
      move(next);
      if (verdict !== null && next === equal) resolve();
      else requestAnimationFrame(frame);
    };
    frame();
  });
}

function sentence(verdict, { receipt, tokens, offset, altered = {} }) {
  const model = receipt.made_by.model.slice(0, 12);
  if (verdict.equal) {
    const signed = verdict.signed_by ? `, signed by ${verdict.signed_by.slice(0, 12)}…` : "";
    return `Equal: all ${count(verdict.tokens)} tokens, every logit and the end came out as they stand there, ` +
      `from model ${model}… and seed ${receipt.seed}${signed}.`;
  }
  const place = offset + verdict.equal_tokens;
  const begin = `${REASONS[verdict.reason] ?? verdict.reason}: ${count(verdict.equal_tokens)} tokens came out equal`;
  if (verdict.expected_token_id === null) return `${begin}; ${verdict.explanation}.`;
  const nameOf = (id) => [altered[place], tokens[place]].find((each) => each?.id === id)?.text;
  const name = (id) => (nameOf(id) === undefined ? `token ${id}` : `“${visible(nameOf(id))}”`);
  return `${begin}; then it says ${name(verdict.found_token_id)} where the model says ` +
    `${name(verdict.expected_token_id)}: ${verdict.explanation}.`;
}
