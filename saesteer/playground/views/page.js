// The page's frame: heading, model, key, and the places of the other views. Knows no request.

import { html, nothing } from "../vendor/lit-html/lit-html.js";
import { useKey } from "../actions.js";
import { change } from "../state.js";
import { chat } from "./chat.js";
import { gallery } from "./gallery.js";
import { search } from "./search.js";
import { sliders } from "./sliders.js";

export function page(state) {
  return html`
    <header>
      <img src="icon.svg" alt="" width="28" height="28" />
      <h1>saesteer playground</h1>
      <p class="quiet lead">Turn up what a model has learned, and compare what it says.</p>
      ${state.models.length > 1 ? models(state) : html`<span class="quiet model">${state.model}</span>`}
      ${state.keyNeeded || state.keyWanted ? key(state) : nothing}
    </header>
    ${state.failure ? html`<p class="error" role="alert">${state.failure}</p>` : nothing} ${gallery(state)}
    <main>${sliders(state)} ${chat(state)} ${search(state)}</main>
    <p class="unseen" role="status">${state.status}</p>
  `;
}

function key({ keyWanted }) {
  return html`
    <div class="key">
      <label>
        API key
        <input
          id="key"
          type="password"
          autocomplete="off"
          spellcheck="false"
          aria-describedby="key-note"
          aria-invalid=${keyWanted}
          @change=${(event) => useKey(event.target.value)}
        />
      </label>
      <span id="key-note" class="quiet">
        ${keyWanted ? "The server asks for its key." : "It stays in this page's memory."}
      </span>
    </div>
  `;
}

function models(state) {
  return html`
    <label class="model">
      Model
      <select @change=${(event) => change((s) => (s.model = event.target.value))}>
        ${state.models.map((one) => html`<option .value=${one} .selected=${one === state.model}>${one}</option>`)}
      </select>
    </label>
  `;
}
