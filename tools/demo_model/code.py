"""Simple Python functions: as files, and as answers to a wish."""

import random
from dataclasses import dataclass

from .chats import Exchange, ask
from .grammar import fill, pick


@dataclass(frozen=True, slots=True)
class Snippet:
    """A function: what it does ("adds two numbers"), its name, parameters, body and a call."""

    does: str
    name: str
    params: str
    body: str
    call: str
    result: str

    def source(self, with_doc: bool) -> str:
        """Return the function as Python source."""
        doc = f'    """{self.does[0].upper()}{self.does[1:]}."""\n' if with_doc else ""
        lines = "\n".join("    " + line for line in self.body.split("\n"))
        return f"def {self.name}({self.params}):\n{doc}{lines}"


_ONE_LINERS = (
    ("adds two numbers", "add", "a, b", "return a + b", "add(2, 3)", "5"),
    ("subtracts two numbers", "subtract", "a, b", "return a - b", "subtract(7, 3)", "4"),
    ("multiplies two numbers", "multiply", "a, b", "return a * b", "multiply(2, 4)", "8"),
    ("divides two numbers", "divide", "a, b", "return a / b", "divide(8, 2)", "4.0"),
    ("doubles a number", "double", "n", "return n * 2", "double(4)", "8"),
    ("returns the square of a number", "square", "n", "return n * n", "square(3)", "9"),
    ("checks if a number is even", "is_even", "n", "return n % 2 == 0", "is_even(4)", "True"),
    ("checks if a number is odd", "is_odd", "n", "return n % 2 == 1", "is_odd(4)", "False"),
    ("returns the larger of two numbers", "larger", "a, b", "return a if a > b else b",
     "larger(2, 5)", "5"),
    ("returns the smaller of two numbers", "smaller", "a, b", "return a if a < b else b",
     "smaller(2, 5)", "2"),
    ("reverses a string", "reverse", "text", "return text[::-1]", 'reverse("owl")', "'lwo'"),
    ("returns the length of a list", "length", "items", "return len(items)",
     "length([1, 2, 3])", "3"),
    ("returns the first item of a list", "first", "items", "return items[0]",
     "first([4, 5, 6])", "4"),
    ("returns the last item of a list", "last", "items", "return items[-1]",
     "last([4, 5, 6])", "6"),
    ("says hello to someone", "greet", "name", 'return "Hello, " + name + "!"',
     'greet("Mira")', "'Hello, Mira!'"),
    ("writes a string in upper case", "shout", "text", "return text.upper()", 'shout("hi")',
     "'HI'"),
    ("counts the words in a text", "count_words", "text", "return len(text.split())",
     'count_words("a small fox")', "3"),
    ("checks if a string is a palindrome", "is_palindrome", "text", "return text == text[::-1]",
     'is_palindrome("anna")', "True"),
    ("sorts a list", "sort_items", "items", "return sorted(items)", "sort_items([3, 1, 2])",
     "[1, 2, 3]"),
    ("turns Celsius into Fahrenheit", "to_fahrenheit", "c", "return c * 9 / 5 + 32",
     "to_fahrenheit(100)", "212.0"),
)  # fmt: skip
_LONGER = (
    ("adds up a list of numbers", "total", "numbers",
     "result = 0\nfor n in numbers:\n    result += n\nreturn result", "total([1, 2, 3])", "6"),
    ("finds the largest number in a list", "largest", "numbers",
     "best = numbers[0]\nfor n in numbers:\n    if n > best:\n        best = n\nreturn best",
     "largest([4, 9, 2])", "9"),
    ("computes the factorial of a number", "factorial", "n",
     "if n <= 1:\n    return 1\nreturn n * factorial(n - 1)", "factorial(5)", "120"),
    ("computes the n-th Fibonacci number", "fibonacci", "n",
     "a, b = 0, 1\nfor _ in range(n):\n    a, b = b, a + b\nreturn a", "fibonacci(7)", "13"),
    ("counts the vowels in a text", "count_vowels", "text",
     'count = 0\nfor letter in text:\n    if letter in "aeiou":\n        count += 1\nreturn count',
     'count_vowels("apple")', "2"),
    ("counts down to zero", "count_down", "n",
     "while n >= 0:\n    print(n)\n    n -= 1", "count_down(3)", "None"),
    ("returns the even numbers of a list", "evens", "numbers",
     "result = []\nfor n in numbers:\n    if n % 2 == 0:\n        result.append(n)\nreturn result",
     "evens([1, 2, 4])", "[2, 4]"),
    ("computes the average of a list", "average", "numbers",
     "if not numbers:\n    return 0\nreturn sum(numbers) / len(numbers)", "average([2, 4])", "3.0"),
    ("checks if a number is prime", "is_prime", "n",
     "if n < 2:\n    return False\nfor i in range(2, n):\n    if n % i == 0:\n"
     "        return False\nreturn True", "is_prime(7)", "True"),
    ("counts how often each word appears", "count_each", "words",
     "counts = {}\nfor word in words:\n    counts[word] = counts.get(word, 0) + 1\nreturn counts",
     'count_each(["a", "a"])', "{'a': 2}"),
)  # fmt: skip
SNIPPETS = tuple(Snippet(*row) for row in _ONE_LINERS + _LONGER)


def code_question(rng: random.Random) -> Exchange:
    """Ask for a function."""
    snippet = pick(rng, SNIPPETS)
    head = "[Write|Write|Give me|Show me] a [Python function|function|Python function] that "
    answer = f"```python\n{snippet.source(rng.random() < 0.5)}\n```"
    turns = ask(fill(rng, head, {}) + snippet.does + ".", answer)
    if rng.random() < 0.25:
        turns += ask(f"What does {snippet.call} return?", f"It returns {snippet.result}.")
    return turns


def code_file(rng: random.Random) -> str:
    """Return a file of a few functions."""
    chosen = rng.sample(SNIPPETS, rng.randint(1, 4))
    with_doc = rng.random() < 0.6
    text = "\n\n\n".join(snippet.source(with_doc) for snippet in chosen)
    if rng.random() < 0.4:
        text += "".join(f"\n\n\nprint({s.call})  # {s.result}" for s in chosen[:1])
    return text
