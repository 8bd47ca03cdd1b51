"""A device that several workers use at once, such as the cores of one CPU."""

import simpy


class SharedDevice:
    """Work that goes on at the same time, each piece slowed down once the device is full.

    Args:
        env: the simulation.
        share: of the device that a piece of work uses where nothing else runs, above 0 up to 1: at 1, two pieces at
            once take as long as one after the other; at 0.5 as long as one alone.
    """

    def __init__(self, env: simpy.Environment, share: float) -> None:
        self.env, self.share = env, share
        self._left: dict[simpy.Event, float] = {}  # what remains of each piece, in the time that it takes alone
        self._since = 0.0
        self._change = 0

    def work(self, duration: float) -> simpy.Event:
        """Begin something that takes so long where nothing else runs.

        Returns:
            An event that happens when it is done.
        """
        self._advance()
        done = self.env.event()
        self._left[done] = duration
        self._look_ahead()
        return done

    @property
    def _speed(self) -> float:
        return min(1.0, 1.0 / (self.share * len(self._left)))

    def _advance(self) -> None:
        elapsed, self._since = self.env.now - self._since, self.env.now
        if self._left:
            speed = self._speed
            self._left = {done: left - elapsed * speed for done, left in self._left.items()}

    def _look_ahead(self) -> None:
        """Wake up when the next piece is done, unless others come or go before."""
        self._change += 1
        if not self._left:
            return
        change, next_done = self._change, min(self._left, key=lambda done: self._left[done])
        timer = self.env.timeout(max(self._left[next_done], 0.0) / self._speed)

        def on_time(_: simpy.Event) -> None:
            if change != self._change:
                return
            self._advance()
            del self._left[next_done]
            next_done.succeed()
            self._look_ahead()

        timer.callbacks.append(on_time)
