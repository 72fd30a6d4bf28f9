// A form that asks the server of this page for the prediction of one row.

const form = document.getElementById("ask");
const answer = document.getElementById("answer");

const NAMES = { std: "standard deviation", lower: "lower end", upper: "upper end", aleatoric_std: "standard deviation of the noise",
  epistemic_std: "standard deviation by the weights", aleatoric: "entropy of the noise", epistemic: "entropy by the weights" };

/** The row of the form: null where a field is empty, numbers as numbers. */
function asked() {
  return Object.fromEntries(Array.from(form.querySelectorAll("[data-column]"), field => {
    const text = field.value.trim();
    const value = "number" in field.dataset && Number.isFinite(Number(text)) ? Number(text) : field.value;
    return [field.dataset.column, text === "" ? null : value];
  }));
}

/** What is predicted, in words: the class with its probability, or the mean with its interval. */
function inWords(row, level) {
  if ("prediction" in row) return `${row.prediction}, with probability ${number(row[`p_${row.prediction}`], 3)}`;
  return "mean" in row ? `${number(row.mean, 5)}, and between ${number(row.lower, 5)} and ${number(row.upper, 5)} with probability ${number(100 * level, 3)} %` : "";
}

function shown({ predictions: [row], level, notes }) {
  const { outside, ...values } = row;
  const warnings = outside ? [`This row is outside the training rows: its ${outside} is unlike theirs. The prediction is a guess of the model alone.`] : [];
  const words = inWords(row, level);
  answer.replaceChildren(...(words ? [make("p", { class: "verdict" }, words)] : []),
    ...[...warnings, ...notes].map(note => make("p", { class: "warning" }, note)),
    table("What is predicted", ["", "value"], Object.entries(values).map(([name, value]) => [NAMES[name] || name.replace(/^p_/, "probability of "), typeof value === "number" ? number(value, 6) : String(value)])));
}

function refused(sentence) {
  answer.replaceChildren(make("p", { class: "warning" }, sentence));
}

form?.addEventListener("submit", async event => {
  event.preventDefault();
  const level = document.getElementById("ask-level");
  const body = JSON.stringify({ rows: [asked()], ...(level ? { level: Number(level.value) } : {}) });
  const button = form.querySelector("button");
  button.disabled = true;
  try {
    const reply = await fetch("predict", { method: "POST", headers: { "Content-Type": "application/json" }, body });
    const told = await reply.json();
    if (reply.ok) shown(told);
    else refused(told.rows ? told.rows[0].error : told.error);
  } catch {
    refused("The server did not answer. Is it still running?");
  }
  button.disabled = false;
});
