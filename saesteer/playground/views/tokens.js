// The tokens of an answer, coloured by a feature, and the strongest features of the one that is chosen.

import { html, nothing } from "../vendor/lit-html/lit-html.js";
import { addSlider, colourBy, hideToken, showToken } from "../actions.js";
import { strongest, valueAt } from "../answers.js";
import { keyOf, nameOf } from "../state.js";

const SHADES = 10;

// One stop of the tab key, in which the arrows move from token to token.
export function tokens(state, turn, side, most) {
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
    const shade = state.colour ? shadeOf(valueAt(turn[side], piece, state.colour), most) : 0;
    return html`<span
      role="option"
      id=${id(index)}
      data-index=${index}
      data-shade=${shade}
      aria-selected=${index === chosen}
      >${piece.text}</span
    >`;
  })}${ended ? nothing : html`<span class="quiet" aria-hidden="true">▍</span>`}</div>`;
}

function shadeOf(value, most) {
  return value > 0 && most > 0 ? Math.ceil((SHADES * value) / most) : 0;
}

// What colours the tokens, and what the strongest colour means.
export function colours(state, most) {
  const choices = new Map();
  for (const one of [...(state.colour ? [state.colour] : []), ...state.sliders]) {
    choices.set(keyOf(one), { dictionary: one.dictionary, layer: one.layer, feature: one.feature });
  }
  const choose = (event) => colourBy(choices.get(event.target.value) ?? null);
  const chosen = state.colour ? keyOf(state.colour) : "";
  return html`
    <p class="row">
      <label>
        Colour tokens by
        <select id="colour" @change=${choose}>
          <option value="" .selected=${!chosen}>nothing</option>
          ${[...choices].map(
            ([key, one]) =>
              html`<option .value=${key} .selected=${key === chosen}>${nameOf(one)} ${labelOf(state, one)}</option>`,
          )}
        </select>
      </label>
      ${state.colour ? scale(most) : nothing}
    </p>
  `;
}

function scale(most) {
  return html`<span class="scale">0 <span class="bar" aria-hidden="true"></span> ${most.toPrecision(3)}</span>`;
}

function labelOf(state, feature) {
  return state.labels.get(keyOf(feature))?.label ?? "";
}

// The panel of the chosen token.
export function details(state) {
  const turn = state.turns.find((one) => one.id === state.token?.turn);
  const answer = turn?.[state.token.side];
  const piece = answer?.pieces[state.token.index];
  if (!piece) return nothing;
  const found = strongest(answer, piece);
  const none = state.reads
    ? "Nothing was read here. The last token of an answer never is: the model has not read it."
    : "The answers are sent without their features.";
  return html`
    <aside class="details" aria-live="polite" aria-label="Features of the token">
      <p class="row">
        <strong>Token</strong> <code>${JSON.stringify(piece.text)}</code>
        <button class="small" @click=${hideToken}>Close</button>
      </p>
      ${found.length ? nothing : html`<p class="quiet">${none}</p>`}
      <ul aria-label="Strongest features, after the edits">${found.map((one) => strong(state, one))}</ul>
    </aside>
  `;
}

function strong(state, one) {
  const known = state.labels.get(keyOf(one));
  const share = known?.max_act ? `, ${(one.value / known.max_act).toPrecision(2)} × max_act` : "";
  const feature = { dictionary: one.dictionary, layer: one.layer, feature: one.feature };
  return html`
    <li>
      <span><strong>${nameOf(one)}</strong> ${known?.label ?? ""}</span>
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
