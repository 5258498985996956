"""The page's words."""

from __future__ import annotations

EXAMPLES = (
    "Write a Python function to check whether a string is a palindrome.",
    "Explain in three sentences why the sky is blue.",
    "A baker bakes 18 trays of 12 rolls and sells 150. How many rolls are left?",
)
LOAD_EXAMPLES = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Tell me a short story about a lighthouse keeper.",
    "What is 17 times 23? Show your steps.",
    "List three uses of a paper clip.",
)

HEADER = (
    '<div class="ds-header"><h1>DSpark, live</h1><p>A small draft model guesses several tokens ahead and says how sure '
    "it is; the target model checks them in one step and keeps what it would have written itself.</p></div>"
)

EXPLANATION = """
<div class="ds-prose">
<p>A language model writes one token at a time, and each costs a full pass through its weights. <b>Speculative
decoding</b> saves passes: a much smaller <b>draft</b> proposes a block of tokens, and the big <b>target</b> checks the
whole block in one pass. The first tokens that agree are kept, and the target adds one of its own, so a round always
gains at least one.</p>
<p><b>DSpark</b> also tells how much each guess is worth. The <b>confidence</b> of a slot is the chance that the target
accepts it if it accepted everything before; the product so far is the <b>survival</b>. Where survival gets low,
checking is wasted work, so the block is <b>cut</b> there. How early depends on the load: a machine busy with many
answers has less to spare.</p>
<p>The answer is the one the target gives alone, token for token without sampling. Only the time changes. <b>τ</b> is
the number of tokens a round; a round costs a little more than one plain step, and the rest is gained.</p>
</div>
"""

POLICY = (
    "How much of a block is checked. throughput: what pays most by measured costs, nothing drafted where it doesn't. "
    "confidence and survival: up to the threshold. constant: all."
)
THRESHOLD = (
    "Cut the block at the first slot below this; 0 cuts nothing. For confidence and survival, and with throughput."
)
DRAFTED = "at most what the draft's block gives"
PAIR = "A draft fits one target only."
RACE = "The same prompt with plain generate() and with DSpark, one after the other; who starts takes turns."
LOAD = (
    "Many answers at once as one batch. The more rows share the machine, the fewer drafted tokens are worth checking: "
    "watch the verify length of every row."
)
WAITING = "Waiting for your turn; runs go one at a time."
SLIDER = "Let go of the slider to run."
LISTED = "The rows take them in turn; with one prompt all rows are copies of it."


def footer(queue: int, tokens: int, rows: int) -> str:
    """The page's limits."""
    return (
        f'<p class="ds-dim ds-small">Runs go one at a time; up to {queue} visitors may wait. Answers end after '
        f"{tokens} tokens or two minutes, batches have up to {rows} rows. What you run is kept for your browser tab "
        "only and forgotten when you close it.</p>"
    )
