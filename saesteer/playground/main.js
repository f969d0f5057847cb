// Starts the page: draws it at every change, and asks the server what it has. Knows neither what is drawn nor how.

import { render } from "./vendor/lit-html/lit-html.js";
import { start } from "./actions.js";
import { draw, state } from "./state.js";
import { page } from "./views/page.js";

const root = document.getElementById("page");
root.replaceChildren(); // what stood there until the scripts had come
draw(() => render(page(state), root));
start();
