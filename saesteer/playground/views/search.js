// The search for features, and what it has found. Knows no slider and no answer.

import { html, nothing } from "../vendor/lit-html/lit-html.js";
import { addSlider, chooseDictionary, search as find } from "../actions.js";
import { change, nameOf } from "../state.js";

export function search({ search, dictionaries }) {
  return html`
    <section class="search" aria-labelledby="search-heading">
      <h2 id="search-heading">Find features</h2>
      <form
        role="search"
        @submit=${(event) => {
          event.preventDefault();
          find();
        }}
      >
        <label>
          Dictionary
          <select id="dictionary" @change=${(event) => chooseDictionary(event.target.value)}>
            ${dictionaries.map(
              ({ dictionary }) =>
                html`<option .value=${dictionary} .selected=${dictionary === search.dictionary}>${dictionary}</option>`,
            )}
          </select>
        </label>
        ${search.layer === null ? nothing : layers(search, dictionaries)}
        <label>
          Words, or a number
          <input
            id="words"
            type="search"
            maxlength="200"
            aria-describedby="search-error"
            .value=${search.words}
            @input=${(event) => change((s) => (s.search.words = event.target.value))}
          />
        </label>
        <button ?disabled=${search.busy || !search.dictionary}>Search</button>
      </form>
      <p id="search-error" class="error" role="alert" ?hidden=${!search.error}>${search.error}</p>
      ${search.results ? found(search.results) : nothing}
    </section>
  `;
}

function layers(search, dictionaries) {
  const all = dictionaries.find((one) => one.dictionary === search.dictionary)?.layers ?? [];
  const choose = (event) =>
    change((s) => Object.assign(s.search, { layer: Number(event.target.value), results: null }));
  return html`
    <label>
      Layer
      <select @change=${choose}>
        ${all.map((one) => html`<option .value=${String(one)} .selected=${one === search.layer}>${one}</option>`)}
      </select>
    </label>
  `;
}

function found(results) {
  if (!results.length) return html`<p>No feature has these words.</p>`;
  const { instead } = results[0];
  return html`
    ${instead ? html`<p>No feature has these words. Did you mean ${instead}?</p>` : nothing}
    <ul class="found" aria-label="Features found">
      ${results.map(feature)}
    </ul>
  `;
}

function feature(one) {
  const [example] = one.examples;
  const facts = [
    one.max_act === null ? "" : `max_act ${one.max_act.toPrecision(3)}`,
    one.density === null ? "" : `on ${(100 * one.density).toPrecision(2)} % of tokens`,
  ];
  const effects = [
    one.best ? `writes ${one.writes.slice(0, 3).join(", ")} at ${one.best.value} × max_act` : "",
    one.only_reads ? "only reads: no clamp makes the model say it" : "",
    one.breaks ? `breaks text at ${one.breaks.value} × max_act` : "",
  ];
  return html`
    <li>
      <strong>${nameOf(one)}</strong> ${one.label ?? "no label"}
      <button
        class="small"
        aria-label=${`Add slider for ${nameOf(one)}, ${one.label ?? "no label"}`}
        @click=${() => addSlider(one)}
      >
        Add slider
      </button>
      <p class="quiet">${facts.filter(Boolean).join(", ")}</p>
      <p class="quiet">${effects.filter(Boolean).join(", ")}</p>
      ${example ? html`<p class="example">${example.before}<mark>${example.token}</mark>${example.after}</p>` : nothing}
    </li>
  `;
}
