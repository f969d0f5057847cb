// The form that asks, and the runs, newest first: each question with its plain and its steered answer.

import { html, nothing } from "../vendor/lit-html/lit-html.js";
import { repeat } from "../vendor/lit-html/directives/repeat.js";
import { clear, copy, restore, send, stop } from "../actions.js";
import { textOf } from "../answers.js";
import { SIDES, inMaxAct } from "../requests.js";
import { change, nameOf } from "../state.js";
import { colours, details, tokens, topOf } from "./tokens.js";

const SAMPLING = [
  ["maxTokens", "Tokens at most", "1"],
  ["temperature", "Temperature", "any"],
  ["penalty", "Repetition penalty", "any"],
];
// What a dose does, by its mean; measured on the embedded SAE.
const ZONES = [
  [0.2, "too weak to show"],
  [0.4, "weak"],
  [0.7, "good"],
  [Infinity, "may break the text"],
];

export function chat(state) {
  const top = topOf(state);
  return html`
    <section class="chat" aria-labelledby="chat-heading">
      <h2 id="chat-heading">Ask</h2>
      ${form(state)}
      ${repeat(
        state.turns.toReversed(),
        (turn) => turn.id,
        (turn, place) => exchange(state, turn, top, place === 0),
      )}
    </section>
  `;
}

function exchange(state, turn, top, newest) {
  const follows = turn.history.plain.length ? html`<span class="quiet">continues the run below</span>` : nothing;
  return html`
    <article>
      <p class="user"><span class="unseen">You: </span>${turn.user} ${follows}</p>
      <div class="answers">${SIDES.map((side) => answer(state, turn, side, top))} ${details(state, turn)}</div>
      ${newest ? colours(state, top) : nothing}
      <p class="row">
        <button class="small" @click=${() => copy(turn, "python")}>Copy as Python</button>
        <button class="small" @click=${() => copy(turn, "curl")}>Copy as curl</button>
        ${turn.stored ? html`<span class="quiet">A stored answer. Run it for a fresh one.</span>` : nothing}
      </p>
      ${state.copied?.turn === turn.id ? code(state.copied) : nothing}
    </article>
  `;
}

function answer(state, turn, side, top) {
  const found = turn[side];
  const heading = `${side}-${turn.id}`;
  return html`
    <section class=${side} aria-labelledby=${heading} aria-busy=${!found.ended}>
      <div class="row head">
        <h3 id=${heading}>${side === "plain" ? "Plain" : "Steered"}</h3>
        ${side === "steered" && turn.sliders.length ? chips(turn) : nothing}
      </div>
      <p class="unseen">${found.ended ? textOf(found) : ""}</p>
      ${tokens(state, turn, side, top)}
      ${found.error ? html`<p class="error" role="alert">${found.error}</p>` : nothing}
      ${side === "steered" && found.ended && !found.error ? effect(found) : nothing}
    </section>
  `;
}

// What made an answer; a click puts it back.
function chips(turn) {
  const texts = turn.sliders.map(chip);
  return html`
    <button class="chips" aria-label=${`Put back ${texts.join(", ")}`} @click=${() => restore(turn)}>
      ${texts.map((text) => html`<span>${text}</span>`)}
    </button>
  `;
}

function chip(one) {
  const value = one.mode === "scale" || inMaxAct(one) ? `${one.value} ×` : one.value;
  return `${one.label || nameOf(one)} ${one.mode === "set" ? "" : `${one.mode} `}${value}`;
}

function effect({ dose, applied, unmarked }) {
  const edited = applied.map((one) => `${countOf(one)} by edit ${edits(one)} at ${one.site}`);
  return html`
    <dl class="quiet">
      ${dose.map(
        (one) => html`<div>
          <dt>Dose at ${one.site}</dt>
          <dd>${doseOf(one)}</dd>
        </div>`,
      )}
      <div><dt>Tokens changed</dt><dd>${edited.join("; ") || "none: there is no slider"}</dd></div>
      ${unmarked ? html`<div><dt>No marks</dt><dd>${unmarked}</dd></div>` : nothing}
    </dl>
  `;
}

// An answer that the operator aborts has no counts.
function countOf(one) {
  return "tokens_edited" in one ? one.tokens_edited + one.tokens_cached : "an unknown number";
}

// Without a token that was changed, as behind a condition or from the prefix cache, there is no dose.
function doseOf({ mean, max, tokens }) {
  if (!tokens || mean === null || max === null) return "none: no token was changed";
  const [, verdict] = ZONES.find(([below]) => mean < below);
  return html`
    <meter aria-label="Dose" min="0" max="1" low=${ZONES[1][0]} high=${ZONES[2][0]} optimum="0.55" .value=${mean}></meter>
    ${mean.toPrecision(2)}, ${verdict} <span class="quiet">(${max.toPrecision(2)} at most)</span>
  `;
}

function edits({ edit }) {
  const number = edit.match(/^saesteer\.edits\[(\d+)\]/)?.[1];
  return number === undefined ? edit : Number(number) + 1;
}

function code({ text, done }) {
  return html`
    <label class="code">
      ${done ? "Copied" : "Select and copy"}; it takes the key from $SAESTEER_API_KEY
      <textarea
        readonly
        rows="8"
        spellcheck="false"
        .value=${text}
        @focus=${(event) => event.target.select()}
      ></textarea>
    </label>
  `;
}

function form(state) {
  const submit = (event) => {
    event.preventDefault();
    send();
  };
  const enter = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  };
  const set = (name) => (event) => change((s) => (s[name] = event.target.value));
  const again = !state.continues && state.turns.at(-1)?.user === state.message;
  return html`
    <form class="ask" @submit=${submit}>
      <label>
        <span class="unseen">Question</span>
        <textarea
          id="message"
          rows="1"
          placeholder="A question, such as: Who are you?"
          .value=${state.message}
          @input=${set("message")}
          @keydown=${enter}
        ></textarea>
      </label>
      <div class="row">
        <button class="main" ?disabled=${state.busy || !state.model}>${again ? "Run again" : "Run"}</button>
        <button type="button" ?disabled=${!state.busy} @click=${stop}>Stop</button>
        <button type="button" ?disabled=${state.busy || !state.turns.length} @click=${clear}>Clear</button>
        ${check("Continue the conversation", state.continues, (s, on) => (s.continues = on))}
        <details class="settings">
          <summary>Settings</summary>
          <div class="row">
            ${SAMPLING.map(
              ([name, text, step]) => html`<label>
                ${text}
                <input type="number" min="0" step=${step} .value=${state[name]} @input=${set(name)} />
              </label>`,
            )}
            ${check("Read features", state.reads, (s, on) => Object.assign(s, { reads: on, readError: "" }))}
          </div>
        </details>
      </div>
      <p id="read-error" class="error" role="alert" ?hidden=${!state.readError}>${state.readError}</p>
    </form>
  `;
}

function check(text, on, put) {
  const choose = (event) => change((s) => put(s, event.target.checked));
  return html`<label class="check"><input type="checkbox" .checked=${on} @change=${choose} /> ${text}</label>`;
}
