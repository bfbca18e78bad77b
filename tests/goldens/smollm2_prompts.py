"""What the real default model is asked, here and where its goldens are made."""

from __future__ import annotations

_PLAIN = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "The three primary colours are",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 2, 4, 8, 16,",
    "Photosynthesis is the process by which",
    "She opened the door and saw",
    "The largest planet in our solar system",
)
_ASKED = (
    "Why is the sky blue?",
    "Write a short poem about the rain.",
    "What is 12 times 12?",
    "Name five animals that live in the ocean.",
    "Explain what a compiler does to a child.",
    "Translate 'good morning' into French and Spanish.",
    "How do I boil an egg?",
    "Give me three tips for sleeping better.",
    "Who wrote Romeo and Juliet?",
    "What is the difference between a list and a tuple in Python?",
)
PROMPTS = (
    *_PLAIN,
    *(f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in _ASKED),
)
STEPS = 32

TEXT = """\
The harbour had been quiet since the last ferry left, and the lamps along the quay were lit one \
after the other by a man on a bicycle. He had done this for thirty years, he said, and in all \
that time he had never once seen the same evening twice. Some nights the water lay flat as a \
plate and every lamp had a twin below it; on others the wind came down from the hills and broke \
them into a thousand pieces.

Measuring things carefully is harder than it looks. A thermometer that hangs in the sun tells \
you about the sun, not about the air. A clock that is checked against another clock tells you \
only how far the two disagree. What a good experiment needs is a reference that does not depend \
on what is being measured, enough repetitions to know how much the answer moves by itself, and \
the honesty to write down the runs that went wrong together with those that went well.

To make a simple bread you need flour, water, salt and yeast. Mix four cups of flour with two \
teaspoons of salt and a spoonful of yeast, then add about a cup and a half of warm water and \
stir until there is no dry flour left. Cover the bowl and let it stand overnight. In the \
morning the dough will have doubled in size and will be full of bubbles. Fold it a few times, \
shape it into a ball, let it rest for an hour and bake it in a very hot oven until the crust is \
dark brown.

In the nineteenth century the railways changed not only how people travelled but how they \
thought about time. Before them every town kept its own noon, set by the sun; a traveller going \
west would find the clocks a few minutes slower in each place he came to. Timetables could not \
be printed under such conditions, and so the companies agreed on a common time, which the towns \
adopted one by one, some of them only after years of protest.

A program that runs correctly is not necessarily a program that can be understood. The machine \
does not care about names, but the next reader does. It is worth spending a minute to find the \
word that says what a function is for, and another to remove the comment that repeats what the \
code already says. Programs are read far more often than they are written, and mostly by \
somebody in a hurry.

The forest at the edge of the town is old. Oaks and beeches stand so close together that in \
summer hardly any light reaches the ground, and the only plants below them are ferns and ivy. \
In the spring, however, before the leaves are out, the whole floor is covered with white \
flowers. They have three weeks to grow, bloom and make their seeds, and then the shade closes \
over them again until the next year.
"""
