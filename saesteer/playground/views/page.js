// The page's frame: heading, model, key, and the places of the other views. Knows no request.

import { html, nothing } from "../vendor/lit-html/lit-html.js";
import { useKey } from "../actions.js";
import { change } from "../state.js";
import { chat } from "./chat.js";
import { search } from "./search.js";
import { sliders } from "./sliders.js";

export function page(state) {
  return html`
    <header>
      <h1>saesteer playground</h1>
      ${state.models.length > 1 ? models(state) : html`<span class="quiet">${state.model}</span>`}
      <label class="key">
        API key
        <input
          id="key"
          type="password"
          autocomplete="off"
          spellcheck="false"
          placeholder="if the server has one"
          aria-describedby="key-note"
          aria-invalid=${state.keyWanted}
          @change=${(event) => useKey(event.target.value)}
        />
      </label>
      <span id="key-note" class="quiet">
        ${state.keyWanted ? "The server asks for its key." : "It stays in this page's memory."}
      </span>
    </header>
    ${state.failure ? html`<p class="error" role="alert">${state.failure}</p>` : nothing}
    <main>
      <div class="side">${search(state)} ${sliders(state)}</div>
      ${chat(state)}
    </main>
    <p class="unseen" role="status">${state.status}</p>
  `;
}

function models(state) {
  return html`
    <label>
      Model
      <select @change=${(event) => change((s) => (s.model = event.target.value))}>
        ${state.models.map((one) => html`<option .value=${one} .selected=${one === state.model}>${one}</option>`)}
      </select>
    </label>
  `;
}
