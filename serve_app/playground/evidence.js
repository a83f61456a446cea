// What is known of a token, and what that is called.

import { count, find, make, percent, size, visible } from "./dom.js";

/** How each kind of certificate is shown: by colour and by shape, and in words. */
export const KINDS = {
  deterministic: ["certified", "Certified: a head that reads everything draws this very token."],
  probabilistic: ["certified, nearly surely", "Certified, with a stated chance of being wrong."],
  forced: ["forced by the grammar", "Forced: the grammar allowed no other token."],
  dense: ["every logit", "Dense: every logit was computed exactly."],
  relaxed: ["less than was needed", "Relaxed: less was guaranteed than the request needed."],
  chosen: ["chosen by you", "Chosen by you: the reply goes on from here."],
  plain: ["no evidence asked for", "No certificate was asked for."],
};

export function kindOf(token) {
  if (token.chosen) return "chosen";
  if (!token.certificate) return "plain";
  return token.certificate.need === "forced" ? "forced" : token.certificate.guarantee;
}

export const isAccepted = (token) => Boolean(token.origin?.drafted_by) && kindOf(token) !== "forced";

export function classOf(token) {
  const accepted = isAccepted(token) ? " accepted" : "";
  return `t ${kindOf(token)}${accepted}${token.kept ? " kept" : ""}${token.end ? " end" : ""}`;
}

const NEEDS = {
  top1: () => "the best token",
  topk: (options) => (options?.top_k ? `the ${options.top_k} best tokens (top-k)` : "the k best tokens (top-k)"),
  minp: () => "all tokens near the best (min-p)",
  nucleus: () => "the likeliest tokens that hold the mass of top-p",
  "nucleus-draw": () => "the token that is drawn from the mass of top-p",
  epsilon: () => "nearly all of the mass",
  dense: () => "every logit",
  forced: () => "nothing",
};
const TIERS = { mask: "none: only what the grammar allowed", dense: "none: every row in full" };

/** What numbers are about: a stored reply may be another model's than the one that is served now. */
export const originOf = ({ models, vocabulary_size, head_bytes }) => ({ model: models[0], vocabulary_size, head_bytes });

/** Lines of words and values about a token of a reply. */
export function facts(token, { receipt, made }) {
  const lines = [];
  const own = token.certificate;
  if (own) {
    lines.push(["Asked of the head", NEEDS[own.need]?.(receipt?.options) ?? own.need]);
    if (own.need !== "forced") {
      lines.push(["Screened with", TIERS[own.tier] ?? own.tier]);
      const rows = made ? `${count(own.rescored_rows)} of ${count(made.vocabulary_size)}` : count(own.rescored_rows);
      lines.push(["Rows opened", `${rows} (${percent(own.opened_share, 2)})`]);
      lines.push(["Bytes read", `${size(own.bytes_read)}, its share of a pass`]);
    }
    if (own.fallback) lines.push(["Second way", "a cheaper one did not suffice"]);
    if (own.tightness > 0 && own.tightness < 1) lines.push(["Tightness of bounds", own.tightness.toFixed(4)]);
    if (own.failure_probability > 0) lines.push(["Wrong with at most", own.failure_probability.toExponential(1)]);
  }
  if (token.origin) lines.push(["Draft", draftOf(token)]);
  return lines;
}

function draftOf(token) {
  const { drafted_by: by, rejected } = token.origin;
  if (by === "grammar") return "none: the grammar said it";
  if (by) return `guessed (${by}), and accepted`;
  return rejected === null ? "not guessed" : `instead of the guess “${visible(token.ghost ?? "")}”`;
}

export function buildLegend() {
  const shown = ["deterministic", "probabilistic", "forced", "dense"];
  const marks = shown.map((kind) => make("span", { className: `t ${kind}` }, KINDS[kind][0]));
  marks.push(make("span", { className: "t accepted" }, "guess accepted"));
  find("legend").append(...marks);
}

// Certificates take most of what a reply takes: they are kept as rows of values.
const FIELDS = ["need", "guarantee", "tier", "rescored_rows", "bytes_read", "opened_share",
  "fallback", "tightness", "failure_probability"];

export function packed(token) {
  const { certificate: own, origin } = token;
  const marks = (token.chosen ? 1 : 0) + (token.kept ? 2 : 0) + (token.end ? 4 : 0);
  return [token.id, token.text, own ? FIELDS.map((name) => own[name]) : 0,
    origin ? [origin.drafted_by, origin.rejected] : 0, marks, token.ghost ?? 0];
}

export function unpacked([id, text, own, origin, marks, ghost]) {
  return {
    id, text, chosen: Boolean(marks & 1), kept: Boolean(marks & 2), end: Boolean(marks & 4),
    certificate: own ? Object.fromEntries(FIELDS.map((name, i) => [name, own[i]])) : null,
    origin: origin ? { drafted_by: origin[0], rejected: origin[1] } : null, ghost: ghost || null,
  };
}
