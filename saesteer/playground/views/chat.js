// The conversation: each message with its plain and its steered answer, and the form that sends the next.

import { html, nothing } from "../vendor/lit-html/lit-html.js";
import { repeat } from "../vendor/lit-html/directives/repeat.js";
import { clear, copy, send, stop } from "../actions.js";
import { mostOf, textOf } from "../answers.js";
import { SIDES } from "../requests.js";
import { change } from "../state.js";
import { colours, details, tokens } from "./tokens.js";

const SAMPLING = [
  ["maxTokens", "Tokens at most", "1"],
  ["temperature", "Temperature", "any"],
  ["penalty", "Repetition penalty", "any"],
];

export function chat(state) {
  const most = state.colour ? mostOf(state.turns, state.colour) : 0;
  return html`
    <section class="chat" aria-labelledby="chat-heading">
      <h2 id="chat-heading">Ask</h2>
      ${state.turns.length ? colours(state, most) : nothing}
      ${repeat(
        state.turns,
        (turn) => turn.id,
        (turn) => exchange(state, turn, most),
      )}
      ${details(state)} ${form(state)}
    </section>
  `;
}

function exchange(state, turn, most) {
  return html`
    <article>
      <p class="user"><span class="unseen">You: </span>${turn.user}</p>
      <div class="answers">${SIDES.map((side) => answer(state, turn, side, most))}</div>
      <p class="row">
        <button class="small" @click=${() => copy(turn, "python")}>Copy as Python</button>
        <button class="small" @click=${() => copy(turn, "curl")}>Copy as curl</button>
      </p>
      ${state.copied?.turn === turn.id ? code(state.copied) : nothing}
    </article>
  `;
}

function answer(state, turn, side, most) {
  const found = turn[side];
  const heading = `${side}-${turn.id}`;
  return html`
    <section class=${side} aria-labelledby=${heading} aria-busy=${!found.ended}>
      <h3 id=${heading}>${side === "plain" ? "Plain" : "Steered"}</h3>
      <p class="unseen">${found.ended ? textOf(found) : ""}</p>
      ${tokens(state, turn, side, most)}
      ${found.error ? html`<p class="error" role="alert">${found.error}</p>` : nothing}
      ${side === "steered" && found.ended && !found.error ? effect(found) : nothing}
    </section>
  `;
}

function effect({ dose, applied }) {
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
  return `${mean.toPrecision(2)} on average, ${max.toPrecision(2)} at most, on ${tokens} tokens`;
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
  return html`
    <form class="ask" @submit=${submit}>
      <label>
        Message
        <textarea id="message" rows="2" .value=${state.message} @input=${set("message")} @keydown=${enter}></textarea>
      </label>
      <div class="row">
        <button class="main" ?disabled=${state.busy || !state.model}>Send</button>
        <button type="button" ?disabled=${!state.busy} @click=${stop}>Stop</button>
        <button type="button" ?disabled=${state.busy || !state.turns.length} @click=${clear}>Clear</button>
        ${SAMPLING.map(
          ([name, text, step]) => html`<label>
            ${text}
            <input type="number" min="0" step=${step} .value=${state[name]} @input=${set(name)} />
          </label>`,
        )}
        <label class="check">
          <input
            type="checkbox"
            aria-describedby="read-error"
            .checked=${state.reads}
            @change=${(event) => change((s) => Object.assign(s, { reads: event.target.checked, readError: "" }))}
          />
          Read features
        </label>
      </div>
      <p id="read-error" class="error" role="alert" ?hidden=${!state.readError}>${state.readError}</p>
    </form>
  `;
}
