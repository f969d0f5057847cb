// The stored cases, of which a click loads one. Knows no request.

import { html, nothing } from "../vendor/lit-html/lit-html.js";
import { load } from "../actions.js";

export function gallery({ gallery, turns }) {
  if (!gallery.length) return nothing;
  const shown = turns.at(-1)?.stored;
  return html`
    <section class="gallery" aria-label="Examples">
      <ul>
        ${gallery.map((one) => card(one, one.name === shown))}
      </ul>
    </section>
  `;
}

function card(one, shown) {
  return html`
    <li>
      <button
        class="card"
        aria-pressed=${shown}
        aria-label=${`${one.name}: ${one.question}`}
        @click=${() => load(one)}
      >
        <strong>${one.name}</strong>
        <span class="quiet">${one.question}</span>
        <span class="quote">${one.steered.map(([text]) => text).join("")}</span>
      </button>
    </li>
  `;
}
