"""The words of a report, for whoever meets them for the first time."""

from coterie.report.elements import Html, element

_WORDS = {
    "client": "One person, school, hospital or phone: whoever has rows and keeps them.",
    "alone": "A client's model learnt from its own rows and nothing else.",
    "shared": "What all clients have in common: the part of the models that is made of posts.",
    "joined, or personal": "A client's own model after taking part: made from what is shared and "
    "from its own rows. It stays with the client.",
    "round": "Clients look at what is shared, work on their own rows, and contribute once.",
    "contribution": "What a client sends in a round, made no longer than the clip.",
    "post": "What is released of a round: the sum of contributions, with noise.",
    "epsilon": "How much more probable anything can become because one client took part: at most "
    "by the factor e to the epsilon. 0 says nothing can be learnt of a client; 1 is a strong "
    "promise, 10 a weak one, infinity none.",
    "delta": "The probability with which the factor may be exceeded: it must be far below one over "
    "the number of clients.",
    "relation": "What is compared: with and without the client's contributions (zero_out), or with "
    "another client in its place (replace, which is stricter).",
    "view": "Who looks, and what they see. A guarantee holds for a view.",
    "trade-off (f-DP)": "For every share of false alarms, the least share of clients that the best "
    "possible attack still misses.",
    "simulation": "A run with known random numbers, which can be repeated and protects nobody.",
    "nmse": "Squared error over the squared deviation of the outcomes from their mean: 0 is "
    "perfect, 1 is no better than guessing the mean.",
    "accuracy": "The share of test rows that are answered rightly.",
    "test rows": "Rows of a client that were kept out of training, to measure with.",
    "standard error": "How far a mean would move with other clients, or other seeds; differences "
    "below two of them may be luck.",
}


def show_glossary() -> Html:
    """Explain the words of the page."""
    told = (
        part
        for word, meaning in _WORDS.items()
        for part in (element("dt", word), element("dd", meaning))
    )
    inside = (element("summary", "What the words mean"), element("dl", *told))
    title = element("h2", "Glossary", id="glossary")
    return element("section", title, element("details", *inside, class_="glossary"))
