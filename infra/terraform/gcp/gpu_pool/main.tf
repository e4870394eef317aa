# One pool of GPU nodes on Google Cloud, of the same shape as modules/gpu_pool: the same scripts, another cloud.sh.

locals {
  labels = merge(var.labels, { sllm-pool = var.name })
}

resource "google_compute_instance_template" "node" {
  name_prefix    = "${var.name}-node-"
  project        = var.project
  region         = var.region
  machine_type   = var.machine_type
  tags           = var.network_tags
  labels         = local.labels
  can_ip_forward = false

  disk {
    source_image = var.image
    boot         = true
    auto_delete  = true
    disk_type    = "pd-balanced"
    disk_size_gb = var.boot_disk_gb

    dynamic "disk_encryption_key" {
      for_each = var.kms_key == null ? [] : [var.kms_key]

      content {
        kms_key_self_link = disk_encryption_key.value
      }
    }
  }

  # Encrypted by Google with a key that goes with the machine.
  dynamic "disk" {
    for_each = range(var.local_ssds)

    content {
      type         = "SCRATCH"
      disk_type    = "local-ssd"
      interface    = "NVME"
      disk_size_gb = 375
      boot         = false
      auto_delete  = true
    }
  }

  # No access_config: no public address.
  network_interface {
    subnetwork = var.subnetwork
  }

  scheduling {
    automatic_restart           = !var.spot
    on_host_maintenance         = "TERMINATE"
    preemptible                 = var.spot
    provisioning_model          = var.spot ? "SPOT" : "STANDARD"
    instance_termination_action = var.spot ? "DELETE" : null
  }

  shielded_instance_config {
    enable_secure_boot          = false # NVIDIA's driver in the image is not signed for it
    enable_vtpm                 = true
    enable_integrity_monitoring = true
  }

  service_account {
    email  = google_service_account.node.email
    scopes = ["cloud-platform"]
  }

  metadata = {
    user-data              = local.cloud_config
    shutdown-script        = file("${local.machine}/node/shutdown.sh")
    enable-oslogin         = "TRUE"
    block-project-ssh-keys = "TRUE"
    serial-port-enable     = "FALSE"
  }

  lifecycle {
    create_before_destroy = true
  }
}

resource "google_compute_region_instance_group_manager" "nodes" {
  name                             = var.name
  project                          = var.project
  region                           = var.region
  base_instance_name               = var.name
  target_size                      = var.size
  distribution_policy_zones        = var.zones
  distribution_policy_target_shape = "ANY"

  version {
    instance_template = google_compute_instance_template.node.id
  }

  # A new template is taken by new machines; running ones are drained and replaced by the operator.
  update_policy {
    type                         = "OPPORTUNISTIC"
    minimal_action               = "REPLACE"
    instance_redistribution_type = "NONE"
    max_surge_fixed              = length(var.zones)
    max_unavailable_fixed        = length(var.zones)
  }
}
