"""Prompts made the way the trajectory predictor's authors made theirs: every template with every topic.

25 templates x 40 topics are 1,000 prompts. They are for comparison with prompts that people wrote: a predictor that was
trained and tested on them has seen every template and every topic, whatever the split.
"""

from steerpipe.trace.prompts import FilePrompt

SOURCE = "combinatorial"

TEMPLATES = (
    "Explain {} to a beginner.",
    "What are the most important facts about {}?",
    "Write a short story about {}.",
    "Describe the history of {}.",
    "List five interesting things about {}.",
    "Why does {} matter to people today?",
    "Write a poem about {}.",
    "Compare {} with something similar.",
    "What is a common mistake that people make about {}?",
    "How would you teach {} to a child?",
    "Summarise what is known about {} in one paragraph.",
    "Give three arguments for learning more about {}.",
    "What might {} look like in a hundred years?",
    "Write a dialogue between two friends about {}.",
    "What questions should I ask an expert on {}?",
    "Write a letter to a newspaper about {}.",
    "How does {} affect the environment?",
    "What equipment do I need for {}?",
    "Invent a riddle whose answer is {}.",
    "Tell me something surprising about {}.",
    "Plan a lesson of one hour about {}.",
    "What is the best way to get started with {}?",
    "Write a short speech about {}.",
    "Which books or films deal with {}?",
    "Give a definition of {} and two examples.",
)

TOPICS = (
    "photosynthesis", "the water cycle", "bread baking", "chess", "the Roman Empire", "electric cars", "volcanoes",
    "bicycle repair", "jazz music", "the human heart", "black holes", "gardening", "the printing press", "honey bees",
    "budgeting", "sailing", "the immune system", "castles", "coffee", "prime numbers", "the Moon", "public transport",
    "origami", "earthquakes", "friendship", "the violin", "computer programming", "rainforests", "marathon running",
    "democracy", "glaciers", "photography", "the stock market", "cheese", "dreams", "bridges", "dinosaurs", "knitting",
    "the internet", "migrating birds",
)  # fmt: skip


def combinatorial_prompts() -> list[FilePrompt]:
    """All 1,000, named by their numbers; neighbours share neither template nor topic."""
    found = []
    for shift in range(len(TOPICS)):
        for number, template in enumerate(TEMPLATES):
            topic = (number + shift) % len(TOPICS)
            found.append(FilePrompt(f"{SOURCE}-{number:02d}-{topic:02d}", SOURCE, template.format(TOPICS[topic])))
    return found
