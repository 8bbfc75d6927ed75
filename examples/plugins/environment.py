"""A guessing game: the policy asks with a tool whether its guess is too small, and says the number of the row's label."""

from megatron_rl import Environment, Reply
from megatron_rl.types import Message


class Guess(Environment):
    """One number to find."""

    def compare(self, guess: int) -> str:
        """Say whether the guess is smaller than the number, larger, or right."""
        number = int(self.prompt.label or 0)
        return "right" if guess == number else "smaller" if guess < number else "larger"

    tools = (compare,)

    def step(self, *, message: Message) -> Reply:
        """End with 1 for the number."""
        return Reply(done=True, reward=float(message["content"].strip() == self.prompt.label))
