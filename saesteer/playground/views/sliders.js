// The sliders: one clamp each, with its value, mode, scope, and why the server has refused it. Knows no request.

import { html, nothing } from "../vendor/lit-html/lit-html.js";
import { live } from "../vendor/lit-html/directives/live.js";
import { repeat } from "../vendor/lit-html/directives/repeat.js";
import { removeSlider, setSlider } from "../actions.js";
import { inMaxAct } from "../requests.js";
import { nameOf } from "../state.js";

const MODES = { set: "set to", add: "add", scale: "multiply by", min: "at least", max: "at most" };
const SCOPES = { all: "every token", prompt: "the prompt", user: "my messages", generated: "the answer" };

export function sliders({ sliders }) {
  return html`
    <section class="turned" aria-labelledby="sliders-heading">
      <h2 id="sliders-heading">Sliders</h2>
      ${sliders.length ? nothing : html`<p class="quiet">Find a feature and add it. Each slider is one edit.</p>`}
      <ol class="sliders">${repeat(sliders, (one) => one.id, slider)}</ol>
    </section>
  `;
}

function slider(one, place) {
  const { id, value, mode, scope, error } = one;
  const reach = one.maxAct === null && mode !== "scale" ? 50 : 4;
  const step = reach === 4 ? 0.1 : 1;
  const unit = mode === "scale" ? "times" : inMaxAct(one) ? "× max_act" : "in its own unit";
  const set = (name) => (event) => setSlider(id, { [name]: event.target.value });
  return html`
    <li>
      <fieldset class="slider">
        <legend><strong>${place + 1}. ${one.label || nameOf(one)}</strong> <span class="quiet">${nameOf(one)}</span></legend>
        <input
          type="range"
          aria-label="Value"
          aria-valuetext=${`${value} ${unit}`}
          list=${`ticks-${id}`}
          min=${mode === "scale" ? 0 : -reach}
          max=${reach}
          step=${step}
          .value=${live(value)}
          @input=${set("value")}
        />
        <datalist id=${`ticks-${id}`}>
          ${[0, 1, 2, 3, 4].map((at) => html`<option value=${(at * reach) / 4}></option>`)}
        </datalist>
        <div class="row">
          <label>
            <span class="unseen">Value as a number</span>
            <input
              type="number"
              step="any"
              aria-invalid=${Boolean(error)}
              aria-describedby=${`error-${id}`}
              .value=${live(value)}
              @input=${set("value")}
            />
          </label>
          <span class="quiet">${unit}</span>
          <button class="small" aria-label=${`Remove slider ${place + 1}`} @click=${() => removeSlider(id)}>
            Remove
          </button>
          <details>
            <summary>Mode and scope</summary>
            <label>
              <span class="unseen">Mode</span>
              <select @change=${set("mode")}>${options(MODES, mode)}</select>
            </label>
            <label>
              on
              <select aria-label="Scope" @change=${set("scope")}>${options(SCOPES, scope)}</select>
            </label>
          </details>
        </div>
        <p id=${`error-${id}`} class="error" role="alert" ?hidden=${!error}>${error}</p>
      </fieldset>
    </li>
  `;
}

function options(words, chosen) {
  return Object.entries(words).map(
    ([value, text]) => html`<option .value=${value} .selected=${value === chosen}>${text}</option>`,
  );
}
