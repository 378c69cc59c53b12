"""What a person is typing: drafts as edits, the tokens that can no longer change, and what is likely to come next.

No torch, no clock, no thread, no disk: `now` is an argument, and nothing typed is written anywhere.
"""
