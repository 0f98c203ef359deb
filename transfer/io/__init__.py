"""The shell of `transfer`: engines that move bytes, links that move messages, ports that join both to the sides."""
