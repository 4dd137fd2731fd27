// The dialog that asks for an API key.

import { byId } from "./dom";
import { getKey, setKey } from "./api";

/** Wires the dialog; `onChange` runs when there is a key to try. */
export class KeyDialog {
  private readonly dialog = byId<HTMLDialogElement>("key-dialog");
  private readonly input = byId<HTMLInputElement>("key-input");
  private readonly button = byId("key");
  private isDismissed = false;

  constructor(onChange: () => void) {
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      setKey(this.input.value.trim());
      this.isDismissed = false;
      this.dialog.close();
      onChange();
    });
    byId("key-cancel").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("close", () => (this.isDismissed = !getKey()));
    this.button.addEventListener("click", () => this.open(""));
  }

  /** The server refused: ask, unless the user has just closed the dialog without a key. */
  refused(message: string): void {
    this.button.hidden = false;
    if (!this.isDismissed && !this.dialog.open) this.open(getKey() ? message : "");
  }

  /** The server took the key, or needs none. */
  accepted(): void {
    if (getKey()) this.button.hidden = false;
  }

  private open(message: string): void {
    byId("key-message").textContent = message;
    this.input.value = getKey();
    this.dialog.showModal();
    this.input.select();
  }
}
