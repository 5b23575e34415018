"""What the pages of ``procgroup explain --html`` and ``procgroup top --web`` share: style, tables, the timeline."""
