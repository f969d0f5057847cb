// The tokens of an answer, coloured by what the sliders changed or by a feature, and the strongest features of the one that is chosen.

import { html, nothing } from "../vendor/lit-html/lit-html.js";
import { addSlider, colourBy, hideToken, showToken } from "../actions.js";
import { changeAt, mostOf, strongest, valueAt } from "../answers.js";
import { CHANGED, keyOf, nameOf } from "../state.js";

const SHADES = 10;
const LIKELIER = 3; // powers of ten that have the strongest colour
const REACH = 2; // times max_act: the same

// One stop of the tab key, in which the arrows move from token to token.
export function tokens(state, turn, side, top) {
  const { pieces, ended } = turn[side];
  const now = () => (state.token?.turn === turn.id && state.token.side === side ? state.token.index : -1);
  const chosen = now();
  const id = (index) => `token-${turn.id}-${side}-${index}`;
  const at = (event) => event.target.closest("[data-index]")?.dataset.index;
  const move = (event) => {
    // Two keys may be pressed before the first is drawn.
    const to = { ArrowLeft: now() - 1, ArrowRight: now() + 1, Home: 0, End: pieces.length - 1 }[event.key];
    if (event.key === "Escape") hideToken();
    if (to === undefined) return;
    event.preventDefault();
    if (pieces[to]) showToken(turn.id, side, to, true);
  };
  const show = (pinned) => (event) => at(event) && showToken(turn.id, side, Number(at(event)), pinned);
  const enter = () => now() < 0 && pieces.length && showToken(turn.id, side, 0, false);
  // Without blanks between the tokens: they would be shown.
  return html`<div
    class="tokens"
    role="listbox"
    tabindex="0"
    aria-label=${`Tokens of the ${side} answer; arrow keys move`}
    aria-activedescendant=${chosen < 0 ? "" : id(chosen)}
    @keydown=${move}
    @focus=${enter}
    @pointerover=${(event) => event.pointerType === "mouse" && show(false)(event)}
    @click=${show(true)}
  >${pieces.map((piece, index) => {
    const shade = shadeOf(strengthOf(state, turn[side], piece), top);
    return html`<span
      role="option"
      id=${id(index)}
      data-index=${index}
      data-shade=${shade}
      aria-selected=${index === chosen}
      >${blank(piece.text)}<span>${piece.text.trimStart()}</span></span
    >`;
  })}${tail(turn[side])}</div>`;
}

// The blanks before a word have no colour: at the end of a line they would be a mark of nothing.
function blank(text) {
  return text.slice(0, text.length - text.trimStart().length);
}

function tail({ ended, cut }) {
  if (!ended) return html`<span class="quiet" aria-hidden="true">▍</span>`;
  return cut ? html`<span class="quiet" title="The limit of tokens ends it here">…</span>` : nothing;
}

function strengthOf({ colour }, answer, piece) {
  if (colour === CHANGED) return changeAt(answer, piece);
  return colour ? valueAt(answer, piece, colour) : null;
}

function shadeOf(value, top) {
  return value > 0 && top > 0 ? Math.min(SHADES, Math.ceil((SHADES * value) / top)) : 0;
}

// What has the strongest colour: the same for all answers, unless a feature's largest activation is unknown.
export function topOf(state) {
  if (state.colour === CHANGED) return LIKELIER;
  if (!state.colour) return 0;
  const known = maxActOf(state, state.colour);
  return known ? REACH * known : mostOf(state.turns, state.colour);
}

function maxActOf({ sliders, labels }, feature) {
  const key = keyOf(feature);
  return labels.get(key)?.max_act ?? sliders.find((one) => keyOf(one) === key)?.maxAct ?? null;
}

// What colours the tokens, and what the strongest colour means.
export function colours(state, top) {
  const { colour } = state;
  const choices = new Map();
  for (const one of [...(colour?.dictionary ? [colour] : []), ...state.sliders]) {
    choices.set(keyOf(one), { dictionary: one.dictionary, layer: one.layer, feature: one.feature });
  }
  const choose = ({ target }) => colourBy(target.value === CHANGED ? CHANGED : (choices.get(target.value) ?? null));
  const chosen = colour?.dictionary ? keyOf(colour) : (colour ?? "");
  return html`
    <p class="row">
      <label>
        Colour tokens by
        <select id="colour" @change=${choose}>
          <option value=${CHANGED} .selected=${chosen === CHANGED}>what the sliders changed</option>
          ${[...choices].map(
            ([key, one]) =>
              html`<option .value=${key} .selected=${key === chosen}>${nameOf(one)} ${labelOf(state, one)}</option>`,
          )}
          <option value="" .selected=${!chosen}>nothing</option>
        </select>
      </label>
      ${colour ? scale(...ends(state, top)) : nothing}
    </p>
  `;
}

function ends(state, top) {
  if (state.colour === CHANGED) return ["as likely", `${(10 ** LIKELIER).toLocaleString("en")} times likelier`];
  return ["0", maxActOf(state, state.colour) ? `${REACH} × max_act` : top.toPrecision(3)];
}

function scale(low, high) {
  return html`<span class="scale">${low} <span class="bar" aria-hidden="true"></span> ${high}</span>`;
}

function labelOf({ sliders, labels }, feature) {
  const key = keyOf(feature);
  return labels.get(key)?.label ?? sliders.find((one) => keyOf(one) === key)?.label ?? "";
}

// The panel of the chosen token, below the answers of its run.
export function details(state, turn) {
  if (state.token?.turn !== turn.id) return nothing;
  const { side, index } = state.token;
  const answer = turn[side];
  const piece = answer.pieces[index];
  if (!piece) return nothing;
  const found = strongest(answer, piece);
  const none = turn.stored
    ? "A stored answer has no features. Run it to read them."
    : state.reads
    ? "Nothing was read here. The last token of an answer never is: the model has not read it."
    : "The answers are sent without their features.";
  return html`
    <aside class="details of-${side}" aria-live="polite" aria-label="Features of the token">
      <p class="row">
        <strong>Token</strong> <code>${JSON.stringify(piece.text)}</code>
        <button class="small" @click=${hideToken}>Close</button>
      </p>
      ${likelier(changeAt(answer, piece))} ${found.length ? nothing : html`<p class="quiet">${none}</p>`}
      <ul aria-label="Strongest features, after the edits">${found.map((one) => strong(state, one))}</ul>
    </aside>
  `;
}

function likelier(change) {
  if (change === null) return nothing;
  const times = Number((10 ** Math.abs(change)).toPrecision(2)).toLocaleString("en");
  if (times === "1") return html`<p>The sliders left it as likely as before.</p>`;
  return html`<p>The sliders made it <strong>${times} times ${change > 0 ? "likelier" : "less likely"}</strong>.</p>`;
}

function strong(state, one) {
  const known = state.labels.get(keyOf(one));
  const share = known?.max_act ? `, ${(one.value / known.max_act).toPrecision(2)} × max_act` : "";
  const feature = { dictionary: one.dictionary, layer: one.layer, feature: one.feature };
  return html`
    <li>
      <span><strong>${known?.label ?? ""}</strong> <span class="quiet">${nameOf(one)}</span></span>
      <span class="quiet">${one.value.toPrecision(3)}${share}</span>
      <span class="row">
        <button class="small" aria-label=${`Colour tokens by ${nameOf(one)}`} @click=${() => colourBy(feature)}>
          Colour
        </button>
        <button class="small" aria-label=${`Add slider for ${nameOf(one)}`} @click=${() => addSlider(feature)}>
          Add slider
        </button>
      </span>
    </li>
  `;
}
